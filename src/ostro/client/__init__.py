"""The Python client for the HTTP API: `Client` and `AsyncClient`. Knows the API's objects, and nothing of the engine.

Each call is described once (`calls`); errors, retries and streams are handled without I/O (`failures`,
`gathering`, `target`); and two thin shells send and wait (`client`, `async_client`).
"""

"""The Python client of the HTTP API: `Client` and `AsyncClient`. Knows the wire's objects; knows nothing of the engine.

Each call is described once (`calls`); errors, retries and streams are handled without I/O (`failures`, `retries`,
`gathering`, `target`); and two thin shells send and wait (`client`, `async_client`).
"""

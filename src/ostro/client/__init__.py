"""The Python client for the HTTP API: `Client` and `AsyncClient`. Knows the API's objects, and nothing of the engine.

Each call is described once (`calls`); errors, retries and streams are handled without I/O (`failures`, `gathering`,
`target`); and a thin shell sends and waits (`async_client`). `client`, the blocking one, is generated from that.
"""

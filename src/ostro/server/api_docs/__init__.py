"""/docs and /redoc: the OpenAPI document as pages, from files that come with the server."""

"""/docs: the OpenAPI document as a page, from files that come with the server."""

"""Which replica serves a request: by health, load, model and prefix. Knows names, loads, digests; no HTTP, no Ray."""

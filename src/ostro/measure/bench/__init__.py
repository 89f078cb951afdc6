"""Load tests for servers with an OpenAI-compatible API, from their users' point of view: `ostro bench`."""

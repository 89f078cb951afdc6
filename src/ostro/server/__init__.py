"""The OpenAI-compatible HTTP server. Imports no torch."""

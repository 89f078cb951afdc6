"""The OpenAI-compatible HTTP server: what clients send and what they get. Imports no torch."""

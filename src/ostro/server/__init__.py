"""The OpenAI-compatible face of the engine: what clients send and what they get. Imports no torch."""

"""Prompts to requests, progress to completions: what `LLM` and the server share."""

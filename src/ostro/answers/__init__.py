"""Splits a model's raw answer into reasoning, text and tool calls. Knows text only: no HTTP, no engine."""

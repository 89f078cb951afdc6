"""Logits to tokens on the host and on torch, one implementation for each array library."""

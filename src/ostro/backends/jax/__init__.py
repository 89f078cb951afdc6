"""Runs models with JAX on a mesh of devices, tensor parallel. Imports no torch; no other package imports JAX."""

"""Runs models with JAX on a mesh of devices, tensor parallel. Imports no torch, and jax is imported nowhere else."""

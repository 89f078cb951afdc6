"""Tensor parallelism on torch: one process per rank; the first runs the engine."""

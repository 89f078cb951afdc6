"""Tensor parallelism on torch: one process per rank, of which the first has the engine."""

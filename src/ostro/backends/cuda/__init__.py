"""Runs a model on a GPU: whole decode steps as CUDA graphs, one step ahead of the host."""

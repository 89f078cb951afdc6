"""Runs one batch on a device: the seam, the torch runner, the sampler, and a runner without a model."""

"""Runs one batch on a device: torch, GPU and native runners, the sampler, and a fake runner without a model."""

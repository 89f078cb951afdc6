"""Servers on a virtual clock: the real engine, prefix cache and router, with measured step times instead of devices."""

"""Many models, few of them loaded at once: which exist, which are loaded, which to evict. Imports no torch."""

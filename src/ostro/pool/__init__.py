"""Many models, few of them loaded at a time: which there are, which are loaded, which must go. Imports no torch."""

"""The models that a server has: built from settings, found by name, held while in use."""

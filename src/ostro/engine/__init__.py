"""Decides what runs next: sequences, pages, the prefix cache, the schedule. Imports no torch."""

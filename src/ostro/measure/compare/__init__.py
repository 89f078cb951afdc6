"""Compares two servers or models on the same prompts and settings: their answers and their speed.

prompts ─> run ─┬─> side A: a server's dialect over HTTP, or a model in this process ─┬─> agreement, speed ─> table
                └─> side B: likewise, after A has finished                            ┘                       report
"""

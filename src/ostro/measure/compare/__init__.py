"""Two servers or models side by side: the same prompts, the same settings, what they say and how fast.

prompts ─> run ─┬─> side A: a server's dialect over HTTP, or a model in this process ─┬─> agreement, speed ─> table
                └─> side B: likewise, after A has finished                            ┘                       report
"""

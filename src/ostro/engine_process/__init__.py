"""The engine in a process of its own: `process` runs it, `handle` is the API process's end, `messages` go between."""

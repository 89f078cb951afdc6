"""The engine in a separate process: `process` runs it, `handle` is the API process's side, `messages` go between."""

"""Load on a server that speaks OpenAI's API, and what its users would have seen: `ostro bench`."""

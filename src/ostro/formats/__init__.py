"""File formats by themselves: JSON, YAML, GGUF headers, torch's archives. Knows no models and no places."""

"""File formats: JSON, YAML, GGUF headers, torch archives. Knows no models and no locations."""

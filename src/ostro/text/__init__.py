"""Text to token ids and back: tokenizers, chat templates, incremental output, stop strings. Imports no torch."""

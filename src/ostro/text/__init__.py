"""Text on one side, token ids on the other: tokenizers, chat templates, incremental output, stop strings. No torch."""

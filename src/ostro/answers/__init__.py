"""What a model's raw answer is made of: reasoning, text and tool calls. Knows text only: no HTTP, no engine."""

"""OpenAI's Responses and Anthropic's Messages, translated into chat requests and back. Knows no engine, no sockets."""

"""Records of requests, and their export as metrics and traces."""

"""What is recorded of each request, as metrics and as traces."""

"""What runs Ostro elsewhere. Only `deploy.ray` is Python."""

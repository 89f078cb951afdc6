"""What runs Ostro elsewhere. Of it `deploy.ray` is imported; Triton loads its model.py by path."""

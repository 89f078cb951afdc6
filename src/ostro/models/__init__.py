"""Model families, one file each, and what they share."""

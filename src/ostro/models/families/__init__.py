"""Model families, one file each: translate the family's config.json into an `Architecture`. Imports no torch."""

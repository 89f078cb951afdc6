"""Model families, a file each: from the family's config.json to an `Architecture`. Imports no torch."""

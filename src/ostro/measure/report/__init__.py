"""Common parts of reports: formatted numbers, plots, page layout. Knows no particular measurement."""

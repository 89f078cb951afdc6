"""What reports of measurements have in common: numbers as words, plots, the page's look. Knows no measurement."""

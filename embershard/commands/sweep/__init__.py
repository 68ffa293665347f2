"""`embershard sweep`: trains many runs from one file."""

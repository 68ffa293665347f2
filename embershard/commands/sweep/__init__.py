"""`embershard sweep`: many runs from one file, their results in one table."""

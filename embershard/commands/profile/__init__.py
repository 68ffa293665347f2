"""`embershard profile`: one pass over a data set, and what it found."""

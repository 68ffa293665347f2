"""`embershard data`: checks a data set before it is trained on."""

"""`embershard export`: a trained model as files that need no embershard."""

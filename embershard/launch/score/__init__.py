"""`embershard predict` and `embershard eval`: what a trained model says of samples, and how good it is."""

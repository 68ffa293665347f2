"""`embershard doctor`: checks this machine."""

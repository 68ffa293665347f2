"""`embershard doctor`: what is installed, and what does not fit."""

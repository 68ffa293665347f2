"""`embershard train`: starts the ranks, trains, and shows how it goes."""

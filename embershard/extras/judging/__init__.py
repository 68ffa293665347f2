"""What columns of a data set are: `embershard data inspect`, and `embershard train FILE.csv`."""

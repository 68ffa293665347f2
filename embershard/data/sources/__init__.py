"""Where samples come from: one module per kind of data, and how their files are read."""

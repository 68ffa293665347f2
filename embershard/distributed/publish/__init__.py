"""Publications of a run: a folder with a chain of bases and deltas, from which replicas serve."""

"""A plan's prediction beside a run's measurement."""

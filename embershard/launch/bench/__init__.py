"""`embershard bench`: the project's benchmarks beside what was measured before."""

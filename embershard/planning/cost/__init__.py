"""The cost of work on a machine: rates, and their fit to measurements."""

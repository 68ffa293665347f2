"""A study of scaling in one file: what each run's plan predicted beside what was measured, and simulated ranks."""

"""The command line. See docs/training.md and docs/planning.md."""

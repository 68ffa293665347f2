"""What a user types: a folder or a file per command. See docs/training.md and docs/planning.md."""

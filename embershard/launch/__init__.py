"""placeholder; its author replaces this line."""

"""Models of what the package promises, as plainly as it can be said: slow, and obviously right."""

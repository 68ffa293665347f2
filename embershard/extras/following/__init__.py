"""A training that follows a folder in which files arrive."""

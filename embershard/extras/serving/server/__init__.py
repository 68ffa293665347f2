"""`embershard serve`: an exported model over HTTP."""

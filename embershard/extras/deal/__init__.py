"""Dealing: which rank trains which sample of a global batch, so that all ranks have about equally much to do."""

"""Starts ranks on this machine, watches them, and starts them again."""

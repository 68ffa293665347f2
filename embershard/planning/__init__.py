"""Beside training: where every table goes, how large every cache is, what that will give, and what it gave."""

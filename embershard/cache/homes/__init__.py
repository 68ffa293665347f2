"""Homes: a class for each place where the rows of a pool live while they are in no slot."""

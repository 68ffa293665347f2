"""Exports of a model, and the servers and replicas that answer with them."""

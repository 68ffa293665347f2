"""Histories in groups of like lengths: a batch goes through a network so, and plans count its work so."""

"""What may be taken out. Nothing outside imports it: each extra is a name in one registry, which is imported when it is
asked for (`embershard.lazy_names.named`). `tests/without.py` lists them."""

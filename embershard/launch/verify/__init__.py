"""`embershard verify`: the first steps of a run with the cache and with stock TorchRec, compared bit for bit."""

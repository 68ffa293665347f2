"""`embershard verify`: a run with the cache beside stock TorchRec, compared bit by bit."""

"""Tables over ranks: TorchRec's plans with cached tables."""

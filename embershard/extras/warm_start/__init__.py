"""Warm starts: a new run, or a TorchRec program, begins with the rows and layers of a trained model."""

"""TorchRec's planner, set up with the costs and limits of caches."""

"""What a run saves, compares and goes on from."""

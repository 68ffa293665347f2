"""What `embershard profile show --png` draws: hit rates by the size of a cache, and the most that any cache has."""

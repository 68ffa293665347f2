"""What a run learns, for replicas while it trains: a folder with a chain of bases and deltas."""

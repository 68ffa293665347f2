"""How good predictions are, and what a run reports while it trains."""

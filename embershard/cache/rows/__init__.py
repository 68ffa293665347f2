"""The host tier, and everything that moves rows between it and the slots."""

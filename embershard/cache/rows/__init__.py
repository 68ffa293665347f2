"""The host tier, and the transfers that move rows between it and the slots."""

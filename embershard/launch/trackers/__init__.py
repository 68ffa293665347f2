"""What a run tells experiment trackers."""

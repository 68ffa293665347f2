"""What a run tells experiment trackers, and the log of MLPerf."""

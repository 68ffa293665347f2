"""The mode "hot_cold" (FAE): the most frequent rows on every rank, and batches of hot samples alone."""

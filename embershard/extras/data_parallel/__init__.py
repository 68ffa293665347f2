"""The mode "data_parallel" (cDLRM): every rank caches the rows of its whole batch, over one copy of the tables."""

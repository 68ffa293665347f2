"""Parts of a pool: what hears of the stages of its batches."""

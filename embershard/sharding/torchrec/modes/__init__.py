"""What travels between ranks other than pooled embeddings: distinct rows, hot rows, data-parallel tables."""

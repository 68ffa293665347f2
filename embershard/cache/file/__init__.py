"""The file tier: host memory as a cache of rows in front of a file (`cache.host = "file"`)."""

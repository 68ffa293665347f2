"""`embershard plan`: places tables, sizes caches, and explains; calibrates machines."""

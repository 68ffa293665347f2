"""Tables: text files with columns, and Parquet files. Columns are declared by name."""

"""What a run tells: tables, pages, records and trackers."""

"""Settings: TOML as dataclasses, what a resume may change, and code that a setting names."""

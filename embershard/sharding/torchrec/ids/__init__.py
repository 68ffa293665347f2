"""Tables whose rows are found by ids without a bound."""

"""`embershard report`: what a run did, beside what was planned."""

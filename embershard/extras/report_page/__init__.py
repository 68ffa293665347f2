"""`embershard report -o FILE.html`: runs and sweeps as one page that needs no network."""

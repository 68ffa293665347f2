"""`embershard plan --calibrate`: measures a machine, and writes a topology."""

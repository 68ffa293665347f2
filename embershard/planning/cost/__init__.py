"""What work costs on a machine: rates, and how they are fitted to measurements."""

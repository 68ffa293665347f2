"""What a model would need before machines are rented: plans compared, simulated scaling, and their pictures."""

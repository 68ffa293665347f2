"""What a model would need before machines are rented: how certain a step time is, and which machines reach a target."""

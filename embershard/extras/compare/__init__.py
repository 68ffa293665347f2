"""`embershard compare`: whether one model is better than another on the same samples, or by chance."""

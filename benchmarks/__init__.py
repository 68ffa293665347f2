"""One script per claim; each prints JSON. What was measured, and on which machine, is in results/."""

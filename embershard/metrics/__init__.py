"""How good predictions are: figures of samples, comparisons of runs, curves and rankings."""

"""Hit rates without training: the cache run over a trace, and formulas from counts alone."""

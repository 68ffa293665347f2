"""Tests: unit (one process), ranks (several gloo processes), gpu (skipped without CUDA)."""

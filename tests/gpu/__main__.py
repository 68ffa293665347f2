"""The GPU tests, where there is a GPU: `make test` and `make test-all` run them after all others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.exit(pytest.main(["-q", str(Path(__file__).parent)]) if torch.cuda.is_available() else 0)

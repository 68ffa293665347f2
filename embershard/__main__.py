"""``python -m embershard``: the command line."""

from __future__ import annotations

import sys

from embershard.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

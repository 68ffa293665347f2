"""Scores samples with a model that `embershard export` wrote. Needs torch and numpy, not embershard.

    python examples/serve.py EXPORTED samples.json

samples.json is a list of samples as they are in the data: {"age": 31.5, "user": 4711, "items": [3, 5]}.
"""

import json
import sys
from pathlib import Path

import torch


def main(folder: str, samples: str) -> None:
    """Print a score per sample."""
    sys.path.insert(0, folder)
    from model import load  # the folder's own; no other file is needed

    model = load(folder)
    task = json.loads(Path(folder, "export.json").read_text())["task"]
    dense, ids, offsets = model.encode(json.loads(Path(samples).read_text()))
    with torch.no_grad():
        outputs = model(dense, ids, offsets)
    print(json.dumps((outputs if task == "regression" else outputs.sigmoid()).tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Scores samples with a model that `embershard export` wrote, or with what a run publishes while it trains. Needs torch
and numpy, not embershard.

    python examples/serve.py EXPORTED samples.json
    python examples/serve.py PUBLISHED samples.json 60

samples.json is a list of samples as they are in the data: {"age": 31.5, "user": 4711, "items": [3, 5]}. PUBLISHED is
the publish.folder of a run: the samples are scored every second, for 60 seconds, each time by the newest state there.
"""

import json
import sys
import time
from pathlib import Path

import torch


def main(folder: str, samples: str, seconds: str = "0") -> None:
    """Print a score per sample; while it follows a run, behind the step of the state."""
    bases = sorted(Path(folder).glob("base_*[0-9]"))
    root = bases[-1] if bases else Path(folder)
    sys.path.insert(0, str(root))
    task = json.loads((root / "export.json").read_text())["task"]
    content = json.loads(Path(samples).read_text())
    if not bases:
        from model import load  # the folder's own; no other file is needed

        print(json.dumps(scores(load(root), content, task)))
        return
    from replica import Replica

    replica, ends = Replica(folder), time.monotonic() + float(seconds)
    replica.follow()
    while True:
        with replica.state() as (model, have):  # nothing changes in between
            found = scores(model, content, task)
        print(f"step {have.step}: {json.dumps(found)}", flush=True)
        if time.monotonic() >= ends:
            break
        time.sleep(1)


def scores(model: torch.nn.Module, samples: list, task: str | list[str]) -> list:
    """Return the scores of samples; of several labels one each, whose tasks may differ."""
    dense, ids, offsets = model.encode(samples)
    with torch.no_grad():
        outputs = model(dense, ids, offsets)
    are_numbers = [each == "regression" for each in ([task] if isinstance(task, str) else task)]
    return outputs.where(torch.tensor(are_numbers), outputs.sigmoid()).tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The example that is TorchRec's own code but for two lines: the same run without them has the same losses."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix
from tests.ranks.commands import run_script

# More steps than the pipeline knows batches ahead (64): rows that were evicted come back, with what they had learned.
STEPS, LOG_EVERY = 100, 20


EXAMPLE = ["examples/torchrec_dlrm.py", "--steps", str(STEPS), "--log-every", str(LOG_EVERY)]


def by_torchrun(project: Path) -> str:
    """What the example prints on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(project), environment.get("PYTHONPATH", "")])
    command = [*torchrun, *EXAMPLE]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", matrix("by torchrun")])
def test_two_changed_lines_keep_every_bit_and_never_wait(project_dir: Path, tmp_path: Path, how: str) -> None:
    theirs = run_script([*EXAMPLE, "--stock"], tmp_path)
    ours = run_script(EXAMPLE, tmp_path) if how == "forked" else by_torchrun(project_dir)
    pattern = re.compile(r"^step (\d+)  loss (\S+)  waited for (\d+) rows$", re.MULTILINE)
    steps, losses, waited = zip(*pattern.findall(ours), strict=True)
    stock_steps, stock_losses, stock_waited = zip(*pattern.findall(theirs), strict=True)
    assert steps == stock_steps == ("1", *(str(step) for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY)))
    assert losses == stock_losses
    assert float(losses[-1]) < float(losses[0]) - 0.1
    assert set(stock_waited) == {"0"}

    tables = re.findall(r"(\d+) fills \((\d+) on the critical path\), (\d+) evictions$", ours, re.MULTILINE)
    assert len(tables) == 4
    assert all(int(evictions) > 1000 for _, _, evictions in tables)
    assert int(waited[0]) > 0  # the first batch's rows: there was nothing to hide them behind
    assert set(waited) == {waited[0]}
    assert sum(int(late) for _, late, _ in tables) == int(waited[0])
    assert "evictions" not in theirs


def test_the_pair_differs_in_the_sharder_and_the_pipeline_alone(project_dir: Path) -> None:
    """What stands under ``if args.stock`` and its ``else``, and nothing else asks for it."""
    code = (project_dir / "examples" / "torchrec_dlrm.py").read_text()
    pairs = re.findall(r"^    if args\.stock:\n( {8}.*)\n    else:\n( {8}.*)\n\n", code, re.MULTILINE)
    assert code.count("args.stock") == len(pairs) == 2
    sharders, pipelines = ([line.split("#")[0].strip() for line in pair] for pair in pairs)
    assert sharders == [
        "sharder = EmbeddingBagCollectionSharder()",
        "sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=args.ratio))",
    ]
    assert pipelines == [
        "pipeline = TrainPipelineSparseDist(model, optimizer, device)",
        "pipeline = LookAheadPipeline(model, optimizer, device)",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "2"], "argument --ratio: got 2, needed a number in (0, 1]"),
        matrix(["--rows", "0"], "argument --rows: got 0, needed at least 1"),
        matrix([], "torchrun starts its ranks"),
    ],
)
def test_wrong_arguments_are_one_line(project_dir, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    program = str(project_dir / "examples" / "torchrec_dlrm.py")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]

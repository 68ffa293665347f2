"""How far simulated speeds were from measured ones: what must be said beside a predicted speed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from statistics import median

from embershard.planning.cost.rates import Precision
from embershard.settings.decoding import read_toml


@dataclass(frozen=True)
class PublicPoint:
    """A throughput that others measured, beside the simulated one; `benchmarks/simulator_back_test.py` has the sources,
    and what is assumed of each run.

    >>> PublicPoint("TorchRec", "dlrm", "a100-40x1", 16_384, "tf32", 740_065, 501_832, "dense").error
    -0.322

    Attributes:
        system: the program that was measured.
        machine: the topology's name.
        batch_size: samples per rank.
        precision: of the dense layers; an A100's and an H100's Tensor Cores are as fast in fp16 as in bf16.
        reported, simulated: samples per second of all ranks.
        limited_by: the part that takes most of the simulated step.
    """

    system: str
    model: str
    machine: str
    batch_size: int
    precision: Precision
    reported: int
    simulated: int
    limited_by: str

    @property
    def error(self) -> float:
        """Simulated over reported samples per second, minus 1."""
        return round(self.simulated / self.reported - 1, 3)


#: What `python -m benchmarks.simulator_back_test --public` found.
PUBLIC_POINTS = tuple(
    PublicPoint(*row) for row in read_toml(resources.files(__package__).joinpath("public_points.toml"))["points"]
)
#: Median and largest error of `python -m benchmarks.simulator_back_test`: step times on a calibrated CPU.
CALIBRATED_MEDIAN, CALIBRATED_LARGEST, CALIBRATED_CASES = 0.052, 0.179, 21
#: How many times as long as told for ours FBGEMM's cache takes for an id on an H100: 2.9 ns for 0.28
#: (benchmarks/kernel_points.py). No GPU has measured ours.
UNMEASURED = 10
_DO_NOT_BUY = "Do not choose or buy machines by it: measure them"
_CALIBRATE = f"{_DO_NOT_BUY}, with embershard plan --calibrate."
_RECALIBRATE = f"{_DO_NOT_BUY}, by a run there (embershard report --recalibrate)."


def caches_note(seconds: float) -> str:
    """Return the sentence on the caches of a plan for GPUs, which find slots in so many seconds of a step."""
    return (
        f"No GPU has measured these caches: finding slots is told to take {1e3 * seconds:.2g} ms of a step, and "
        f"the range of the step has {UNMEASURED} times that, as published of FBGEMM's cache."
    )


def error_note(limit: str, *, is_calibrated: bool, is_gpu: bool) -> str:
    """Return what the error of such a prediction was where it could be compared.

    Args:
        limit: the part that limits the predicted step.
        is_calibrated: the machine's rates were measured, not assumed.

    >>> error_note("fills", is_calibrated=False, is_gpu=True)[:70]
    'Error of such a prediction, limited by fills: not known, no published '
    """
    of_such = f"Error of such a prediction, limited by {limit.replace('_', ' ')}:"
    if is_calibrated:
        compared = (
            f"of step times on calibrated CPUs, over {CALIBRATED_CASES} runs that the calibration had not seen, the "
            f"median was {CALIBRATED_MEDIAN:.1%} and the largest {CALIBRATED_LARGEST:.1%}"
        )
        return f"{of_such} {'not known for a GPU; ' if is_gpu else ''}{compared}."
    if not is_gpu:
        return f"{of_such} not known, no CPU's assumed speed was compared with a measured one. {_CALIBRATE}"
    alike = [point for point in PUBLIC_POINTS if point.limited_by == limit]
    known = f"{of_such} " if alike else f"{of_such} not known, no published figure is. Over all limits: "
    points = alike or PUBLIC_POINTS
    errors, systems = [point.error for point in points], sorted({point.system for point in points})
    machines = ", ".join(sorted({point.machine[:4].upper() for point in points}))
    return (
        f"{known}on {len(points)} published figures of DLRM and DCNv2 ({', '.join(systems)} on {machines}) simulated "
        f"samples/s were off by {min(errors):+.0%} to {max(errors):+.0%}, in the median by "
        f"{median(map(abs, errors)):.0%}. {_RECALIBRATE}"
    )

"""How far simulated speeds were from measured ones: what must be said beside a predicted speed."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.planning.cost.rates import Precision


@dataclass(frozen=True)
class PublicPoint:
    """A throughput that others measured, beside the simulated one; `benchmarks/simulator_back_test.py` has the sources,
    and what is assumed of each run.

    >>> PublicPoint("dlrm", "a100-40x1", 16_384, reported=740_065, simulated=501_832, limited_by="dense").error
    -0.322

    Attributes:
        machine: the topology's name.
        batch_size: samples per rank.
        reported, simulated: samples per second of all ranks.
        limited_by: the part that takes most of the simulated step.
        precision: of the simulated dense layers, as far as is known of the measured ones; Tensor Cores are as fast in
            fp16 as in bf16.
    """

    model: str
    machine: str
    batch_size: int
    reported: int
    simulated: int
    limited_by: str
    precision: Precision = "fp32"

    @property
    def error(self) -> float:
        """Simulated over reported samples per second, minus 1."""
        return round(self.simulated / self.reported - 1, 3)


#: What `python -m benchmarks.simulator_back_test --public` found.
PUBLIC_POINTS = (
    PublicPoint("dlrm", "a100-40x1", 16_384, 740_065, 794_410, "dense"),
    PublicPoint("dlrm", "a100-40x1", 16_384, 740_065, 1_535_546, "dense", "tf32"),
    PublicPoint("dlrm", "a100-40x4", 4_096, 1_458_176, 1_726_311, "dense"),
    PublicPoint("dlrm", "a100-40x4", 4_096, 1_458_176, 1_726_231, "overhead", "tf32"),
    PublicPoint("dlrm", "a100-40x8", 2_048, 1_671_168, 1_811_129, "overhead"),
    PublicPoint("dlrm", "a100-40x8", 2_048, 1_671_168, 1_811_211, "overhead", "tf32"),
    PublicPoint("dlrm", "a100-40x8", 8_192, 5_373_952, 5_360_911, "dense"),
    PublicPoint("dlrm", "a100-40x8", 8_192, 5_373_952, 6_311_596, "overhead", "tf32"),
    PublicPoint("dlrm", "a100-40x8", 256, 284_615, 236_595, "overhead"),
    PublicPoint("dlrm", "a100-40x8", 256, 284_615, 236_603, "overhead", "tf32"),
    PublicPoint("dlrm_dcnv2", "a100-40x8", 16_384, 1_190_128, 1_074_245, "dense"),
    PublicPoint("mlperf_dcnv2", "h100x8", 6_912, 15_300_000, 12_989_711, "dense", "bf16"),
    PublicPoint("mlperf_dcnv2", "h100x8x16", 1_056, 70_800_000, 38_558_274, "network", "bf16"),
)
#: Median and largest error of `python -m benchmarks.simulator_back_test`: step times on a calibrated CPU.
CALIBRATED_MEDIAN, CALIBRATED_LARGEST, CALIBRATED_CASES = 0.052, 0.179, 21
_DO_NOT_BUY = "Do not choose or buy machines by it: measure them"
_CALIBRATE = f"{_DO_NOT_BUY}, with embershard plan --calibrate."
_RECALIBRATE = f"{_DO_NOT_BUY}, by a run there (embershard report --recalibrate)."


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
    errors, models = [point.error for point in points], sorted({point.model for point in points})
    machines = " and ".join(sorted({point.machine[:4].upper() for point in points}))
    return (
        f"{known}on {len(points)} published figures ({', '.join(models)} on {machines}) simulated samples/s were "
        f"off by {min(errors):+.0%} to {max(errors):+.0%}. {_RECALIBRATE}"
    )

"""`BestEvaluation`, and `best.json` beside the checkpoints: the one that is kept since no later one was better."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from embershard.errors import InvalidCheckpointError
from embershard.settings.decoding import decode
from embershard.whole_file import whole_file

BEST = "best.json"


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run.

    Attributes:
        step: steps trained by then.
        metric: the figure that decides, as `train.metric` names it.
        value: of it.
        quality: all figures of this evaluation, by name.

    >>> Path("best").mkdir()
    >>> BestEvaluation(200, "auc", 0.782).write(Path("best"))
    >>> BestEvaluation.find(Path("best")).value
    0.782
    """

    step: int
    metric: str
    value: float
    quality: dict[str, float | None] = field(default_factory=dict)

    @classmethod
    def find(cls, checkpoints: Path) -> BestEvaluation | None:
        """Return what the file in a folder of checkpoints says; None where there is none.

        Raises:
            InvalidCheckpointError: it cannot be read.
        """
        file = checkpoints / BEST
        try:
            return decode(cls, json.loads(file.read_bytes()), InvalidCheckpointError)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, InvalidCheckpointError) as error:
            raise InvalidCheckpointError(f"{file} cannot be read ({error})") from error

    def write(self, checkpoints: Path) -> None:
        """Write the file; its checkpoint is complete."""
        with whole_file(checkpoints / BEST) as partial:
            partial.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @property
    def title(self) -> str:
        """The evaluation in a few words."""
        return f"{self.metric} {self.value:.5g} at step {self.step}"

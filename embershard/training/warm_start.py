"""`WarmStart`: what a new run is asked to begin with (`embershard.extras.warm_start`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Step of a checkpoint, that of the best evaluation, or None: the newest valid one.
Step = int | Literal["best"] | None
#: The entry of a run that began so in the scalars of its checkpoints.
WARM_START = "warm_start"
#: In place of a name that begins anew: the states of both optimizers.
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Words:
    """How a user asks for what messages advise: templates of options, or of arguments.

    >>> IN_PROGRAM.without.format("over")
    'without=["over"]'
    """

    renames: str = "--map {}={}"
    without: str = "--without {}"


OF_COMMAND, IN_PROGRAM = Words(), Words('renames={{"{}": "{}"}}', 'without=["{}"]')


@dataclass(frozen=True)
class WarmStart:
    """What to begin with.

    Attributes:
        path: folder of a run, of one of its checkpoints, or of an export.
        step: of the run's checkpoint; "best": that of the best evaluation; None: the newest valid one.
        renames: old and new names, of features, tables, or layers.
        without: such names that begin anew; "optimizer": the states of both optimizers do.
        keep_steps: the schedule goes on where it was.
        words: of who asks.

    >>> WarmStart(Path("runs/monday"), renames=(("item", "product"),), without=("optimizer",)).has_states
    False
    """

    path: Path
    step: Step = None
    renames: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    keep_steps: bool = False
    words: Words = OF_COMMAND

    @property
    def has_states(self) -> bool:
        """The optimizers go on, too."""
        return OPTIMIZER not in self.without

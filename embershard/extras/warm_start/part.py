"""`WarmStarted`: the part of a run that begins with a trained model, or with rows from files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from embershard.distributed import complete_checkpoints
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.errors import ConfigError, EmbershardError
from embershard.extras.warm_start.pretrained import Vectors, read_pretrained
from embershard.extras.warm_start.start import PlannedStart, fill_model, plan_start
from embershard.training.checkpoint.host_rows import load_weights, tensors_to_fill
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report
from embershard.training.warm_start import WarmStart


@dataclass(frozen=True)
class WarmStartReport(Report):
    """What a run began with.

    `fates` are numbers of tables and layers; `ids`, of each table of ids, those with a row and those that found none;
    `vectors`, of tables that began with those of a file, their number.
    """

    kind = "warm_start"
    told_by = ()

    source: str
    fates: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """Return which ids found a row."""
        return "\n".join(
            f"table {name}: {placed:,} ids have a row, {left:,} found none" for name, (placed, left) in self.ids.items()
        )


class WarmStarted(Part):
    """Fills the model before the first step, and tells the optimizers with which step they begin. A run that goes on
    from a checkpoint takes nothing, and its checkpoint says how it began.

    Args:
        start: what to begin with; None: rows of files only.
    """

    def __init__(self, run: Training, start: WarmStart | None) -> None:
        super().__init__(run)
        self._start, self._is_due = start, True
        self._plan: PlannedStart | None = None
        self._vectors: list[Vectors] | None = None

    def check(self) -> None:
        """Match before anything is built.

        Raises:
            ConfigError, CheckpointError, DataError: as `plan_start` and `read_pretrained`.
        """
        if not self.run.config.cache.rows_are_memory:
            host, more = self.run.config.cache.host, ""
            if host == "file":
                more = " --set cache.host_bytes=..."
            raise ConfigError(
                f'cache.host: got "{host}", needed "memory" or "mmap" where a run begins with a trained model, or with '
                'rows of a file. Save its first step with cache.host = "mmap", then go on: --resume --set '
                f"cache.host={host}{more}"
            )
        folder = self.run.checkpoints
        if not self.run.ranks.from_first(lambda: folder and complete_checkpoints(folder)):
            self._prepare()

    def notes(self) -> list[str]:
        if not self._is_due:
            return []
        found = [] if self._plan is None else [str(self._plan)]
        return [*found, *(each.title for each in self._vectors or ())]

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._is_due, self._plan, self._vectors = False, None, None

    def begin(self) -> Iterable[Report]:
        """Fill the model, unless the run goes on from a checkpoint."""
        if not self._is_due:
            return
        if self._vectors is None:
            self._prepare()
        self._is_due, run, placed = False, self.run, dict[str, tuple[int, int]]()
        fates: Counter[str] = Counter()
        if (plan := self._plan) is not None:
            placed |= fill_model(plan, run.model, run.optimizers.dense, run.state.tensors)
            steps = {"schedule_steps": plan.schedule_steps, "state_steps": plan.state_steps}
            run.optimizers.begin_behind({"source": plan.model.title, **steps})
            fates.update(f"{entry.kind}s_{entry.fate}" for entry in plan.matching.entries)
        vectors, self._vectors = self._vectors or [], []
        placed |= self._fill(vectors)
        numbers = {each.table.name: len(each.keys) for each in vectors}
        source = run.optimizers.begun.get("source", "")
        yield WarmStartReport(run.steps, source, dict(fates), self._of_all(placed), numbers)

    def _prepare(self) -> None:
        run, taken = self.run, set[str]()
        if self._start is not None:
            self._plan = plan_start(self._start, run.config, run.ranks)
            taken = {entry.name for entry in self._plan.matching.of("table")}
        self._vectors = run.ranks.together(lambda: read_pretrained(run.config, without=taken), EmbershardError)

    def _fill(self, vectors: list[Vectors]) -> dict[str, tuple[int, int]]:
        """Fill rows from files. Collective. Return what `Vectors.fill` does."""
        placed: dict[str, tuple[int, int]] = {}
        if vectors:
            with without_known_warnings():
                weights = tensors_to_fill(self.run.model, self.run.state.tensors)["model"]
                for each in vectors:
                    placed |= each.fill(weights)
                load_weights(self.run.model, weights)
        return placed

    def _of_all(self, placed: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return the sums over ranks: ids with a row, and those that found none, by table."""
        found: dict[str, tuple[int, int]] = {}
        for of_rank in self.run.ranks.all_gather_objects(placed):
            for name, (with_row, without) in of_rank.items():
                before = found.get(name, (0, 0))
                found[name] = before[0] + with_row, before[1] + without
        return found

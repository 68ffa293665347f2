"""Replays steps of all ranks, event by event: what runs at the same time, and who waits for what.

On a GPU, the stages of a step run on resources of their rank, each of which does one thing at a time, in this order;
P is the prefetch depth and L the look-ahead (`embershard.pipeline.look_ahead` has the schedule)::

    resource    stages in step i
    prepare     plan i + P
    copies      write-backs i + P, fills i + P
    host        overhead: launches step i, at most one step before the GPU
    train       [overhead], lookup, [embeddings], forward, backward, [gradients], update, [all-reduce], optimizer: of i
    exchange    embeddings i, buckets of the all-reduce i, gradients i, the last bucket i, ids i + L + 1: collective
    input       samples i + L + 2
    all         rows that groups average, behind the step
    disk        pages of rows in a file, some batches ahead: no step waits, unless the disk is slower than all steps

A collective begins when the last rank reaches it. On a CPU all stages of a rank run one after the other, and the ranks
of a node share its cores: where there are fewer cores than ranks, a rank that waits leaves its share to the others. So
does one with little to send to ranks of its own node: cores copy those bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embershard.planning.cost.rates import PARTS, TERMS, RankRates, Rates, StepWork
from embershard.sharding.plan import Plan
from embershard.sharding.run_shape import RunShape

Floats = NDArray[np.float64]

#: The part of a step in which ranks wait for slower ones.
STRAGGLERS = "stragglers"
_FORWARD = {"dense_flops": 1 / 3, "activation_bytes": 1 / 3, "launches": 1 / 3}
_BACKWARD = {"dense_flops": 2 / 3, "activation_bytes": 2 / 3, "launches": 2 / 3}
#: Of the collectives of a step with one group of tables: four for the batch ahead, one each for the others.
_COLLECTIVE = 1 / 7
#: Stage -> the share of each kind of work that it does. The shares of a kind add up to 1.
STAGES: Mapping[str, Mapping[str, float]] = {
    "input": {"input_seconds": 1},
    "ids": {"sent_id_bytes": 1, "network_id_bytes": 1, "num_collectives": 4 * _COLLECTIVE},
    "plan": {"planned_ids": 1, "unique_ids": 1},
    "fills": {"fills": 1, "bytes_to_device": 1},
    "write_backs": {"write_backs": 1, "bytes_to_host": 1},
    "lookup": {"embedding_bytes": 1 / 3, "row_ids": 1},
    "embeddings": {"sent_embedding_bytes": 1, "network_embedding_bytes": 1, "num_collectives": _COLLECTIVE},
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "all_reduce": {"all_reduce_bytes": 1, "num_collectives": _COLLECTIVE},
    "gradients": {"sent_gradient_bytes": 1, "network_gradient_bytes": 1, "num_collectives": _COLLECTIVE},
    "update": {"embedding_bytes": 2 / 3},
    "optimizer": {"update_bytes": 1},
    "sync": {"sent_sync_bytes": 1, "network_sync_bytes": 1},
    "disk": {"moved_pages": 1},
    "overhead": {"more_pieces": 1},
}
_PART_OF = {amount: part for amount, _, part in TERMS}
_RATE_OF = {amount: rate for amount, rate, _ in TERMS}
#: Collectives on the link, each behind the stages of the rank that it waits for; on a CPU, in this order.
_SEGMENTS = (
    (("input", "plan", "fills", "write_backs", "overhead", "lookup"), "embeddings"),
    (("forward", "backward"), "all_reduce"),
    ((), "gradients"),
    (("update", "optimizer"), "ids"),
)
#: A lookup waits for these stages of its batch; the part of the step that such a wait counts as.
_BEFORE_LOOKUP = (("all_to_all", "ids"), ("planning", "plan"), ("write_backs", "write_backs"), ("fills", "fills"))
#: DistributedDataParallel adds up gradients in buckets of 25 MiB while the backward goes on.
_BUCKET_BYTES = 25 * 2**20
_MOST_BUCKETS = 16
#: What ran ahead at first is used up by then: the time of a step is off by a part in 32 at most.
_SETTLING_STEPS = 32
_STEPS, _JITTERED_STEPS = 4, 40
_MOST_LOOKAHEAD = 8  # a longer one absorbs no more jitter than this


@dataclass(frozen=True)
class Pipeline:
    """What decides which parts of a step overlap: of a `RunShape`, or of a plan, which says no more of its run.

    Attributes:
        ranks_per_node: ranks that share a node's cores.
        cores_per_node: on a CPU; None: every rank has its own.
        lookahead, prefetch: batches whose ids, and whose rows, are brought in ahead of time; 0: in the step itself.
    """

    device: Literal["cpu", "cuda"]
    ranks_per_node: int
    cores_per_node: int | None = None
    lookahead: int = 1
    prefetch: int = 1

    @classmethod
    def of(cls, plan: Plan, cores_per_node: int | None) -> Pipeline:
        """The pipeline of a run by this plan, on nodes with so many cores."""
        ahead = (int(plan.settings.get(f"look_ahead.{name}", 1)) for name in ("lookahead", "prefetch"))
        return cls(plan.device, plan.ranks_per_node, cores_per_node, *ahead)

    @classmethod
    def of_run(cls, shape: RunShape) -> Pipeline:
        """The pipeline of a run of this shape."""
        ahead = (shape.cache.lookahead, shape.cache.prefetch)
        return cls(shape.device, min(shape.ranks_per_node, shape.world_size), shape.cores_per_node, *ahead)

    def cores_for(self, num_ranks: int) -> int | None:
        """Return the cores that the ranks of a node take turns on, of so many ranks in all; None: each has its own."""
        local, cores = min(self.ranks_per_node, num_ranks), self.cores_per_node
        take_turns = self.device == "cpu" and cores is not None and local > cores and num_ranks % local == 0
        return cores if take_turns else None

    def cores_copy(self, num_ranks: int) -> bool:
        """Return whether cores that ranks take turns on copy what is sent: all ranks are on one node."""
        return num_ranks <= self.ranks_per_node and self.cores_for(num_ranks) is not None


@dataclass(frozen=True)
class StepReplay:
    """The steps of all R ranks, once they repeat.

    Attributes:
        step_seconds: of a step, the same for all ranks, which wait for each other.
        parts: name -> seconds [R] of a step in which the training of a rank does that, or waits for it: the `PARTS`,
            and "stragglers". They add up to `step_seconds`. What runs beside the training is not in them.
    """

    step_seconds: float
    parts: Mapping[str, Floats]

    def before_sync(self, seconds: Floats) -> StepReplay:
        """Return the steps with averages behind them, which take each rank so long [R], and all the longest."""
        longest = float(seconds.max())
        parts = {**self.parts, "sync": seconds, STRAGGLERS: self.parts[STRAGGLERS] + longest - seconds}
        return StepReplay(self.step_seconds + longest, parts)

    def beside_disks(self, seconds: Floats) -> StepReplay:
        """Return the steps where each rank's disk takes so long [R] for a step, several batches ahead of the training:
        all wait where it is slower."""
        longest = float(seconds.max())
        if longest <= self.step_seconds:
            return self
        own = np.maximum(0.0, seconds - self.step_seconds)
        others = longest - self.step_seconds - own
        parts = {**self.parts, "disk": self.parts["disk"] + own, STRAGGLERS: self.parts[STRAGGLERS] + others}
        return StepReplay(longest, parts)

    @property
    def own_seconds(self) -> Floats:
        """Seconds [R] of a step without waiting for slower ranks."""
        return self.step_seconds - self.parts[STRAGGLERS]

    @property
    def mean_parts(self) -> dict[str, float]:
        """Mean seconds of each part over the ranks."""
        return {name: float(seconds.mean()) for name, seconds in self.parts.items()}

    def bottleneck(self, rank: int) -> str:
        """Return the part that takes the most of a rank's own time."""
        return max(PARTS, key=lambda name: self.parts[name][rank])

    @property
    def slowest(self) -> int:
        """The rank that waits least for others."""
        return int(np.argmin(self.parts[STRAGGLERS]))


def replay_steps(works: Sequence[StepWork], rates: RankRates, pipeline: Pipeline, *, jitter: float = 0.0) -> StepReplay:
    """Replay steps of ranks with this work, until they repeat. Deterministic.

    Args:
        works: of each rank in a step.
        rates: of a rank, while all ranks of its node are at work; of each one where they differ.
        jitter: standard deviation of a rank's time for the same work, from step to step, relative to its mean.

    >>> work = StepWork(dense_flops=3e9, bytes_to_device=1e9)
    >>> rates = Rates(seconds_per_flop=1e-12, seconds_per_byte_to_device=1e-12)
    >>> [round(replay_steps([work], rates, Pipeline(device, 1)).step_seconds, 6) for device in ("cpu", "cuda")]
    [0.004, 0.003]
    """
    stages = _stage_parts(works, rates)
    settling = _SETTLING_STEPS if pipeline.device == "cuda" else 0
    num_steps = settling + (_JITTERED_STEPS if jitter else _STEPS)
    noise = np.random.default_rng(0).standard_normal((num_steps, len(works)))
    factors = np.exp(jitter * noise - jitter**2 / 2)
    if pipeline.device == "cpu":
        found = _in_turn(stages, pipeline, factors)
    else:
        buckets = num_buckets(max(work.update_bytes for work in works), works[0].more_pieces > 0)
        found = _Overlapping(stages, pipeline, buckets).run(factors)
    return found.before_sync(stages["sync"]["sync"]).beside_disks(stages["disk"]["disk"])


def num_buckets(parameter_bytes: float, in_pieces: bool) -> int:
    """Return the parts in which the gradients of so many bytes of dense parameters are added up: one where those of
    several pieces are, behind the last backward."""
    return 1 if in_pieces else min(_MOST_BUCKETS, max(1, math.ceil(parameter_bytes / _BUCKET_BYTES)))


def stage_seconds(works: Sequence[StepWork], rates: RankRates) -> dict[str, Floats]:
    """Return the seconds [R] of each stage of a step, for ranks with this work: all of it the same, where there is one
    and several ranks' rates."""
    return {name: np.sum(list(parts.values()), axis=0) for name, parts in _stage_parts(works, rates).items()}


def _stage_parts(works: Sequence[StepWork], rates: RankRates) -> dict[str, dict[str, Floats]]:
    def rate(name: str) -> float | Floats:
        own = [getattr(each, name) for each in ([rates] if isinstance(rates, Rates) else rates)]
        return np.array(own, float) if own[1:] else float(own[0])

    amounts = {name: np.array([getattr(work, name) for work in works], float) for name in _PART_OF}
    found: dict[str, dict[str, Floats]] = {}
    for stage, shares in STAGES.items():
        parts: dict[str, Floats] = {}
        for name, share in shares.items():
            seconds = share * amounts[name] * rate(_RATE_OF[name])
            parts[_PART_OF[name]] = parts.get(_PART_OF[name], 0.0) + seconds
        found[stage] = parts
    found["overhead"]["overhead"] += rate("step_overhead_seconds")  # of the first piece
    return found


def _in_turn(stages: Mapping[str, Mapping[str, Floats]], pipeline: Pipeline, factors: Floats) -> StepReplay:
    """One stage after the other; the ranks wait for each other at the collectives."""
    num_steps, num_ranks = factors.shape
    spent = {name: np.zeros(num_ranks) for name in (*PARTS, STRAGGLERS)}
    for factor in factors:
        for names, collective in _SEGMENTS:
            own = [(part, seconds * factor) for name in names for part, seconds in stages[name].items()]
            work = np.sum([seconds for _, seconds in own], axis=0) if own else np.zeros(num_ranks)
            ends = _shared(work, pipeline)
            stretch = ends / np.where(work > 0, work, 1.0)
            for part, seconds in own:
                spent[part] += seconds * stretch
            spent[STRAGGLERS] += ends.max() - ends
            sent = np.sum(list(stages[collective].values()), axis=0)
            slowest = int(sent.argmax())  # has most to send
            taken = _shared(sent, pipeline).max() if pipeline.cores_copy(num_ranks) else sent[slowest]
            for name, seconds in stages[collective].items():
                spent[name] += seconds[slowest] * (taken / sent[slowest] if sent[slowest] else 1.0)
    parts = {name: seconds / num_steps for name, seconds in spent.items()}
    return StepReplay(float(np.sum([seconds[0] for seconds in parts.values()])), parts)


def _shared(work: Floats, pipeline: Pipeline) -> Floats:
    """Return when each rank is done with its work [R], if all begin at 0.

    Work is in seconds while all ranks of a node are at work. C cores give each of L > C ranks C/L of a core, and a
    whole one once no more than C of them are left.
    """
    local, cores = min(pipeline.ranks_per_node, len(work)), pipeline.cores_for(len(work))
    if cores is None:
        return work
    nodes = work.reshape(-1, local) * (cores / local)  # seconds of one core
    order = nodes.argsort(axis=1)
    ascending = np.take_along_axis(nodes, order, axis=1)
    at_work = np.arange(local, 0, -1)
    ends = np.cumsum(np.diff(ascending, axis=1, prepend=0.0) / np.minimum(1.0, cores / at_work), axis=1)
    done = np.empty_like(ends)
    np.put_along_axis(done, order, ends, axis=1)
    return done.reshape(-1)


class _Overlapping:
    """A GPU's streams: the times [R] at which each resource is free, and at which each batch is ready."""

    def __init__(self, stages: Mapping[str, Mapping[str, Floats]], pipeline: Pipeline, num_buckets: int) -> None:
        self._stages = stages
        self._seconds = {name: np.sum(list(parts.values()), axis=0) for name, parts in stages.items()}
        self._num_ranks = len(self._seconds["overhead"])
        self._ahead = min(pipeline.lookahead, _MOST_LOOKAHEAD)
        self._prefetch = min(pipeline.prefetch, self._ahead)
        self._num_buckets = num_buckets
        zero = np.zeros(self._num_ranks)
        self._free = dict.fromkeys(("prepare", "copies", "train", "exchange", "input", "host"), zero)
        self._ended = [zero, zero]  # the last two steps, of the training
        self._ready: dict[tuple[str, int], Floats | float] = {}
        self._spent = {name: np.zeros(self._num_ranks) for name in (*PARTS, STRAGGLERS)}

    def run(self, factors: Floats) -> StepReplay:
        one = np.ones(self._num_ranks)
        for batch in range(self._ahead + 2):
            self._read(batch, one)
        for batch in range(self._ahead + 1):
            self._send_ids(batch)
        for batch in range(self._prefetch):
            self._make_resident(batch, one)
        for step, factor in enumerate(factors):
            if step == _SETTLING_STEPS:
                began = self._free["train"]
                self._spent = {name: np.zeros(self._num_ranks) for name in self._spent}
            self._step(step, factor)
        counted = len(factors) - _SETTLING_STEPS
        # Ranks end a step at different times, but all of them at the same pace.
        seconds = (self._free["train"] - began) / counted
        parts = {name: spent / counted for name, spent in self._spent.items()}
        longest = float(seconds.max())
        parts[STRAGGLERS] = parts[STRAGGLERS] + longest - seconds
        return StepReplay(longest, parts)

    def _step(self, step: int, factor: Floats) -> None:
        self._wait("input", self._ready["input", step + self._ahead])
        self._make_resident(step + self._prefetch, factor)
        self._read(step + self._ahead + 2, factor)
        # A host that is late by chance catches up: it is ahead.
        self._free["host"] = np.maximum(self._free["host"], self._ended[0]) + self._seconds["overhead"]
        self._wait("overhead", self._free["host"])
        for part, stage in _BEFORE_LOOKUP:
            self._wait(part, self._ready[stage, step])
        self._train("lookup", factor)
        self._wait_for(self._collective("embeddings", self._free["train"]), "embeddings")
        self._train("forward", factor)
        began = self._free["train"]
        self._train("backward", factor)
        ended, num_buckets = self._free["train"], self._num_buckets
        for number in range(1, num_buckets):  # all but the last, each as soon as the backward has its gradients
            self._collective("all_reduce", began + (ended - began) * number / num_buckets, 1 / num_buckets)
        gradients = self._collective("gradients", self._free["train"])
        reduced = self._collective("all_reduce", self._free["train"], 1 / num_buckets)
        self._wait_for(gradients, "gradients")
        self._train("update", factor)
        self._wait_for(reduced, "all_reduce")
        self._train("optimizer", factor)
        self._ended = [self._ended[1], self._free["train"]]
        self._send_ids(step + self._ahead + 1)

    def _read(self, batch: int, factor: Floats) -> None:
        began = np.maximum(self._free["input"], self._free["train"])
        self._free["input"] = self._ready["input", batch] = began + self._seconds["input"] * factor

    def _send_ids(self, batch: int) -> None:
        issued = np.maximum(self._free["train"], self._ready["input", batch])
        _, _, self._ready["ids", batch] = self._collective("ids", issued)

    def _make_resident(self, batch: int, factor: Floats) -> None:
        """Plan, fill and write back; with a prefetch depth of 0 the batch that trains now."""
        began = np.maximum(np.maximum(self._free["prepare"], self._free["train"]), self._ready["ids", batch])
        planned = began + self._seconds["plan"] * factor
        self._free["prepare"] = self._ready["plan", batch] = planned
        written = np.maximum(planned, self._free["copies"]) + self._seconds["write_backs"]
        self._ready["write_backs", batch] = written
        self._free["copies"] = self._ready["fills", batch] = written + self._seconds["fills"]

    def _train(self, stage: str, factor: Floats) -> None:
        for part, seconds in self._stages[stage].items():
            self._spent[part] += seconds * factor
        self._free["train"] = self._free["train"] + self._seconds[stage] * factor

    def _collective(self, stage: str, issued: Floats, share: float = 1.0) -> tuple[Floats, float, float]:
        """Run a collective behind those before it. Returns when each rank could have begun [R], began, and is done."""
        reached = np.maximum(self._free["exchange"], issued)
        began = float(reached.max())
        done = began + share * float(self._seconds[stage].max())
        self._free["exchange"] = np.full(self._num_ranks, done)
        return reached, began, done

    def _wait_for(self, collective: tuple[Floats, float, float], stage: str) -> None:
        """Training waits for a collective: for those before it, for slower ranks, for its bytes and its latency."""
        reached, began, done = collective
        slowest = int(self._seconds[stage].argmax())
        whole = self._seconds[stage][slowest]
        shares = {part: seconds[slowest] / whole for part, seconds in self._stages[stage].items()} if whole else {}
        train = self._free["train"]
        waited = np.maximum(0.0, done - train)
        for_others = np.clip(began - np.maximum(reached, train), 0.0, waited)
        self._spent[STRAGGLERS] += for_others
        for part, share in (shares or {"all_to_all": 1.0}).items():
            self._spent[part] += share * (waited - for_others)
        self._free["train"] = train + waited

    def _wait(self, part: str, until: Floats | float) -> None:
        waited = np.maximum(0.0, until - self._free["train"])
        self._spent[part] += waited
        self._free["train"] = self._free["train"] + waited

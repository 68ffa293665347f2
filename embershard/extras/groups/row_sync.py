"""`RowSync`: groups average the rows that any of them trained, so that replicas are equal again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embershard.distributed.ranks import gather_into
from embershard.distributed.traffic import counted_as
from embershard.errors import ConfigError, ShardingError
from embershard.extras.groups.late_average import LateAverage, group_beside, moved
from embershard.extras.groups.synced_rows import GroupsGuard, synced_rows
from embershard.sharding.config import SyncDtype
from embershard.sharding.torchrec.compat import GroupedEnv
from embershard.stages import is_stage

#: Most bytes of the rows of all replicas that are in memory at a time.
CHUNK_BYTES = 64 << 20
#: Rows are keyed by int32 on the way.
_MOST_ROWS = 1 << 31
_AVERAGING = "averaging the rows that groups trained"
#: Rows that travel together: pairs of a pool's number and some of its keys.
_Chunk = list[tuple[int, Tensor]]


@dataclass(frozen=True)
class SyncCounts:
    """What averages moved so far, on this rank.

    Attributes:
        syncs: averages.
        rows: trained by any group, in all of them.
        row_bytes: weights and states of these rows, as they are sent.
        key_bytes: of the keys that this rank told of.
    """

    syncs: int = 0
    rows: int = 0
    row_bytes: int = 0
    key_bytes: int = 0

    def plus(self, rows: int, row_bytes: int, key_bytes: int) -> SyncCounts:
        """Return the counts after one average more."""
        return SyncCounts(self.syncs + 1, self.rows + rows, self.row_bytes + row_bytes, self.key_bytes + key_bytes)


@dataclass(frozen=True)
class _Begun:
    """An average that is computed beside steps: behind which one it began, its rows, and what they were."""

    step: int
    chunks: list[_Chunk]
    before: list[list[Tensor]]


class RowSync:
    """Averages rows over the groups of a sharded model: weights and optimizer states of every row that any group
    trained since the last average. After it replicas are equal, bit for bit, in slots and in host memory. A row that
    no group trained is not sent, and stays as it is.

    Where all copies of a number are equal it stays, too: a sum of three equal floats divided by three is often another.

    With "fp16", float32 weights are rounded before they are sent, added up as float32, and their mean is rounded once
    more: all replicas take these bits, that which computed them too. What is above 65,504 becomes infinite: checks of
    losses and rows see it. States stay as they are, for sums of squares leave fp16's range, and one that became 0 would
    make a step thousands of times as long. Rows that begin otherwise are averaged as they are.

    The constructor compares what the replicas hold: where they differ before training, all rows are averaged once.

    Args:
        model: sharded with the environment of `Groups`, before anything is trained.
        sync_every: steps between averages.
        sync_delay: steps that an average is computed beside; rows then get the mean, and keep what those steps added to
            them. 0: nothing is trained meanwhile.
        dtype: of weights on the way, "fp32" or "fp16".

    Attributes:
        counts: what was moved so far.

    Raises:
        ConfigError: a number of steps is out of range, there is no such type, or a table is of a kind that cannot be
            averaged.
        ShardingError: the replicas do not have the same tables, shards and states, on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        env: GroupedEnv,
        sync_every: int = 1,
        sync_delay: int = 0,
        dtype: SyncDtype = "fp32",
    ) -> None:
        if not 0 <= sync_delay <= sync_every or sync_every < 1:
            raise ConfigError(
                f"got sync_every={sync_every}, sync_delay={sync_delay}; needed 1 or more steps between averages, and 0 "
                "to as many that an average is computed beside"
            )
        if dtype not in get_args(SyncDtype):
            raise ConfigError(f"got sync_dtype={dtype!r}, needed one of {', '.join(get_args(SyncDtype))}")
        self._group, self._every, self._device = env.replica_pg, sync_every, torch.device(env.device_mesh.device_type)
        self._number, self._delay, self._is_half = dist.get_world_size(self._group), sync_delay, dtype == "fp16"
        self._late = LateAverage(self._device) if sync_delay else None
        self._late_group = group_beside(env) if sync_delay else None
        self._begun: _Begun | None = None
        self._guard = GroupsGuard(f"rank {env.global_rank}, rows of all groups")
        self._rows = synced_rows(model, self._guard)
        self.counts, self._steps, self._equal_at = SyncCounts(), 0, 0
        self._check()
        self._begin()

    @property
    def are_equal(self) -> bool:
        """True where no step was trained since the last average."""
        return self._steps == self._equal_at

    def step(self, must_be_equal: bool = False) -> bool:
        """Note a trained step; average after every `sync_every`-th. Return True if replicas are equal then. Collective;
        call it on all ranks after the optimizers' steps.

        Args:
            must_be_equal: an average that begins here is not computed beside other steps.
        """
        self._steps += 1
        is_due = self._steps % self._every == 0
        if is_due and (must_be_equal or not self._delay):
            self.sync()
            return True
        if self._begun is not None and self._steps >= self._begun.step + self._delay:
            self._end_late()
        if is_due:
            self._begin_late()
        return False

    def begin_behind(self, steps: int) -> None:
        """Note that equal rows were loaded, of a model that has trained so many steps."""
        self.close()
        for rows in self._rows:
            rows.take()
        self._steps = self._equal_at = steps

    @is_stage("averages")
    def sync(self) -> None:
        """Average now, beside the averages of `step`. Collective.

        Raises:
            CacheError: an average before did not end.
        """
        if self._begun is not None:
            self._end_late()
        self._guard.check()
        with self._guard.change(_AVERAGING), counted_as("sync"):
            self._average([rows.take() for rows in self._rows], self._is_half)
            self._equal_at = self._steps

    @is_stage("averages")
    def _begin_late(self) -> None:
        """Read the rows of an average, which other steps are trained beside."""
        late, group = self._late, self._late_group
        assert late is not None, "averages have a delay"
        assert group is not None, "averages have a delay"
        self._guard.check()
        with self._guard.change(_AVERAGING), counted_as("sync"):
            chunks = list(self._to_average([rows.take() for rows in self._rows], self._is_half))
            halved = [self._halved(chunk) if self._is_half else [] for chunk in chunks]
            before = [self._select(chunk) for chunk in chunks]

            @counted_as("sync")  # of the thread, too
            def average() -> list[list[Tensor]]:
                return [mean_over(group, *each) for each in zip(before, halved, strict=True)]

            late.begin(average)
            self._begun = _Begun(self._steps, chunks, before)

    @is_stage("averages")
    def _end_late(self) -> None:
        """Wait for the means, and give them to the rows."""
        late, begun = self._late, self._begun
        assert late is not None, "averages have a delay"
        assert begun is not None, "an average has begun"
        self._guard.check()
        with self._guard.change(_AVERAGING):
            self._begun = None
            for chunk, before, means in zip(begun.chunks, begun.before, late.end(), strict=True):
                now = self._select(chunk)
                self._replace(chunk, [moved(*each) for each in zip(now, before, means, strict=True)])

    def close(self) -> None:
        """Wait for an average that is computed beside the steps, and drop it."""
        self._begun = None
        if self._late is not None:
            self._late.drop()

    # -- how

    def _check(self) -> None:
        """Compare what keys mean on the replicas, once."""
        too_many = [rows.name for rows in self._rows if rows.num_rows >= _MOST_ROWS]
        own: Any = (too_many, [rows.meaning for rows in self._rows])
        every = [(found, meanings) for found, meanings in self._gathered(own)]
        if any(found for found, _ in every):
            raise ConfigError(
                f"{[found for found, _ in every]}: groups average pools and tables of fewer than 2^31 rows"
            )
        for replica, (_, meanings) in enumerate(every):
            if meanings != every[0][1]:
                differ = [pair for pair in zip(every[0][1], meanings, strict=False) if pair[0] != pair[1]]
                what = (
                    f"{differ[0][0]} and {differ[0][1]}" if differ else f"{len(every[0][1])} and {len(meanings)} pools"
                )
                raise ShardingError(
                    f"groups 0 and {replica} are sharded otherwise at one place: {what}. Give all ranks the same plan: "
                    "make it on one, and broadcast it (TorchRec's collective_plan does)"
                )

    def _begin(self) -> None:
        """Average all rows of pools and tables that do not begin equal."""
        starts = self._gathered([rows.start for rows in self._rows])
        none = torch.empty(0, dtype=torch.int64)
        differ = [len(set(each)) > 1 for each in zip(*starts, strict=True)]
        if any(differ):
            self._average(
                [
                    torch.arange(rows.num_rows) if is_other else none
                    for rows, is_other in zip(self._rows, differ, strict=True)
                ]
            )
        self.counts = SyncCounts()

    def _gathered(self, own: Any) -> list[Any]:
        every: list[Any] = [None] * self._number
        dist.all_gather_object(every, own, self._group)
        return every

    def _average(self, own: Sequence[Tensor], is_half: bool = False) -> None:
        """Average the rows whose keys any replica gives; `is_half`: their weights travel as fp16."""
        for chunk in self._to_average(own, is_half):
            halved = self._halved(chunk) if is_half else []
            self._replace(chunk, mean_over(self._group, self._select(chunk), halved))

    def _to_average(self, own: Sequence[Tensor], is_half: bool) -> Iterator[_Chunk]:
        """Yield the rows whose keys any replica gives, and count them."""
        keys = union_of_keys(own, self._group, self._device)
        row_bytes = [rows.row_bytes - is_half * rows.wide_bytes // 2 for rows in self._rows]
        sizes = [(each.numel(), each.numel() * size) for each, size in zip(keys, row_bytes, strict=True)]
        num_rows, num_bytes = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
        yield from self._chunks(keys)
        self.counts = self.counts.plus(num_rows, num_bytes, 4 * sum(each.numel() for each in own))

    def _halved(self, chunk: _Chunk) -> list[bool]:
        """Return of each part of these rows whether it travels as fp16: float32 weights."""
        rows = [self._rows[number] for number, _ in chunk]
        return [part == 0 and each.wide_bytes > 0 for each in rows for part in range(each.num_parts)]

    def _select(self, chunk: _Chunk) -> list[Tensor]:
        return [part for number, some in chunk for part in self._rows[number].select(some)]

    def _replace(self, chunk: _Chunk, parts: list[Tensor]) -> None:
        given = iter(parts)
        for number, some in chunk:
            self._rows[number].replace(some, list(islice(given, self._rows[number].num_parts)))

    def _chunks(self, keys: Sequence[Tensor]) -> Iterator[_Chunk]:
        """Yield the rows in parts that fit into memory."""
        chunk, most = _Chunk(), CHUNK_BYTES // self._number
        room = most
        for number, of_pool in enumerate(keys):
            row_bytes = max(1, self._rows[number].row_bytes)
            while of_pool.numel():
                count = max(1 if not chunk else 0, room // row_bytes)
                if count == 0:
                    yield chunk
                    chunk, room = [], most
                    continue
                some, of_pool = of_pool[:count], of_pool[count:]
                chunk.append((number, some))
                room -= some.numel() * row_bytes
        if chunk:
            yield chunk


def union_of_keys(own: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Return, of each list of keys (int64 [M]), the distinct ones of all ranks: int64, ascending, in host memory.
    Collective; keys travel as int32, from `device`."""
    ranks, own_counts = dist.get_world_size(group), torch.tensor([keys.numel() for keys in own], device=device)
    if not own:
        return []
    counts = own_counts.new_empty(ranks * len(own))
    gather_into(counts, own_counts, group)
    by_rank = counts.view(ranks, len(own)).tolist()
    most = max(map(sum, by_rank))
    if not most:
        return list(own)
    keys = torch.cat(list(own)).int()
    sent = torch.nn.functional.pad(keys, (0, most - keys.numel())).to(device)
    received = sent.new_empty(ranks * most)
    gather_into(received, sent, group)
    parts = [part[: sum(of)].split(of) for part, of in zip(received.cpu().view(ranks, most), by_rank, strict=True)]
    return [torch.cat(of_list).long().unique() for of_list in zip(*parts, strict=True)]


def mean_over(group: dist.ProcessGroup, parts: Sequence[Tensor], halved: Sequence[bool] = ()) -> list[Tensor]:
    """Return the means of tensors over the ranks, number by number: every rank gets the same bits. Collective.

    A rank averages its share of the numbers, of all ranks, and sends the means to all: 2 (n - 1) / n times the bytes.

    Args:
        halved: of each tensor, whether it and its mean travel as fp16; empty: none does.
    """
    ranks, found = dist.get_world_size(group), list(parts)
    outgoing = [part.half() if half else part for part, half in zip(parts, halved or [False] * len(parts), strict=True)]
    for dtype in dict.fromkeys(part.dtype for part in outgoing):
        own = [number for number, part in enumerate(outgoing) if part.dtype == dtype]
        flat = torch.cat([outgoing[number].reshape(-1) for number in own])
        share = -(-flat.numel() // ranks)
        sent = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel()))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        mean = mean_of(received.view(ranks, share))
        gather_into(sent.view(torch.uint8), mean.view(torch.uint8), group)
        sizes = [parts[number].numel() for number in own]
        for number, values in zip(own, sent[: flat.numel()].split(sizes), strict=True):
            found[number] = values.view(parts[number].shape).to(parts[number].dtype)
    return found


def mean_of(copies: Tensor) -> Tensor:
    """Return the mean of copies [n, ...], added in their order; fp16 and bf16 are added as fp32, and rounded once.

    >>> mean_of(torch.tensor([[1.0, 0.1], [2.0, 0.1], [6.0, 0.1]])).tolist()
    [3.0, 0.10000000149011612]
    """
    wide = copies.float() if copies.dtype in (torch.float16, torch.bfloat16) else copies
    total = wide[0].clone()
    for other in wide[1:]:
        total += other
    mean = (total / len(copies)).to(copies.dtype)
    return mean if len(copies) == 2 else torch.where((copies == copies[0]).all(0), copies[0], mean)

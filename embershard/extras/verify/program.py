"""`verify`: a TorchRec program's model with its caches beside the same model of stock TorchRec, compared bit by bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import CacheGrowthWarning
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.extras.verify.comparison import Comparison, Equivalence, Tensors, parts_of, tensors_of
from embershard.extras.verify.twins import cached_sharders, sharded_modules, twin_of
from embershard.machine import host_memory
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.compat import as_keyed_jagged
from embershard.units import size

if TYPE_CHECKING:
    from embershard.extras.verify.id_rows import StockIds


def train_step(model: nn.Module, batch: Any) -> Tensor:
    """Forward and backward of a batch as TorchRec's own models have them: the loss, or a tuple that begins with it."""
    found = model(batch)
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    loss.backward()
    return loss


def verify(
    model: DistributedModelParallel,
    batches: Iterable[Any],
    *,
    step: Callable[[nn.Module, Any], Tensor] = train_step,
    dense_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = torch.optim.SGD,
    seed: int = 0,
) -> Equivalence:
    """Train two copies of a model on some batches, with its caches and with stock TorchRec's tables at the same places,
    and compare every bit of losses, weights and optimizer states. All ranks call it. The model is left as it is.

    Where they are equal and pins hardly mattered, the copy's caches are halved and both are compared again, until they
    did or a smaller cache grows back (decision 0055). Where they differ, the first step is found by bisection, by
    training again from the start: nothing is read from the caches before the step that is compared.

    Args:
        model: with cached sharders, trained or not, without a pipeline.
        batches: of this rank, on the model's device; all of them are kept.
        step: forward and backward of a batch; returns the loss. It may be any of your own that trains one batch of its
            first argument, with `accumulating` in it, too.
        dense_optimizer: of the layers outside of tables, made from their parameters.
        seed: of torch's random numbers, which both begin with.

    Returns:
        The verdict: as text EQUAL, or DIFFERENT with the first step and the tables, rows and ranks that differ after
        it, and what the caches did.

    Raises:
        ConfigError: the memory does not hold both; or the model adds up in another order than stock TorchRec (tables
            that exchange rows, hot rows, whole tables), or has rows in files.

    >>> print(verify(model, loader))  # a sharded model
    EQUAL: 8 steps on 1 rank, with the cache and with stock TorchRec: all losses and 3 tensors of weights ...
    """
    given = list(batches)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ranks = Ranks(rank, world_size, rank % on_node, on_node, model.device)
    _check(model, ranks)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        return _Programs(model, given, step, dense_optimizer, seed, ranks).verdict()


class _Programs(Comparison):
    """The pair of trainings of a program's model."""

    def __init__(
        self,
        model: DistributedModelParallel,
        batches: Sequence[Any],
        step: Callable[[nn.Module, Any], Tensor],
        dense_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        seed: int,
        ranks: Ranks,
    ) -> None:
        super().__init__(ranks, len(batches))
        self._model, self._batches, self._seed = model, batches, seed
        self._step, self._dense_optimizer, self._halvings = step, dense_optimizer, 0
        self._stock: tuple[int, tuple[list[float], Tensors]] | None = None  # of so many steps
        self._ids: StockIds | None = None  # that trained with it

    def _train(self, steps: int) -> tuple[tuple[list[float], Tensors], tuple[list[float], Tensors]]:
        cached = twin_of(self._model, halvings=self._halvings)
        watches = [pool.cache.watch_pins() for pool in cached_embeddings(cached)]
        with warnings.catch_warnings():
            if self._halvings:  # made small on purpose
                warnings.simplefilter("ignore", CacheGrowthWarning)
            found = self._trained(cached, steps)
        self._note_caches(cached, sum(watch.own for watch in watches))
        if self._stock is None or self._stock[0] != steps:  # smaller caches are compared with the same training
            self._stock = None  # frees its memory
            stock = twin_of(self._model, halvings=None)
            self._ids = self._ids_of(stock)
            of_ids = None if self._ids is None else self._ids.after_step
            trained = self._trained(stock, steps, of_ids, self._rounding(stock))
            if self._ids is not None:
                self._ids.add_to(trained[1])
                self._ids.forget_unused(trained[1])
            self._stock = steps, trained
        if self._ids is not None:
            self._ids.forget_unused(found[1])
        return found, self._stock[1]

    def _halve(self) -> None:
        self._halvings += 1

    def _ids_of(self, stock: DistributedModelParallel) -> StockIds | None:
        """Return what gives stock TorchRec's tables rows in place of ids; None where no table takes any id."""
        if not any(sharder.ids for sharder in cached_sharders(self._model)):
            return None
        # Of a capability that may be taken out.
        from embershard.extras.verify.id_rows import StockIds

        return StockIds(self._model, stock, self._ranks)

    def _rounding(self, stock: DistributedModelParallel) -> Callable[[], None] | None:
        """Return what rounds rows of stock TorchRec's tables after a step, as the cache's home does; or None."""
        if not any(sharder.cache.small_types for sharder in cached_sharders(self._model)):
            return None
        # Of a capability that may be taken out.
        from embershard.extras.verify.rounding import TableRounding, small_tables_in

        rounding = TableRounding(small_tables_in(self._model, self._ranks), stock.state_dict(), self._ranks)
        seen: list[KeyedJaggedTensor] = []
        for _, module in sharded_modules(stock.module):
            module.register_forward_pre_hook(lambda _, args: seen.append(as_keyed_jagged(args[0])))

        def after_step() -> None:
            rounding.after_step(seen)
            seen.clear()

        return after_step

    def _trained(
        self, twin: DistributedModelParallel, steps: int, *after_step: Callable[[], None] | None
    ) -> tuple[list[float], Tensors]:
        torch.manual_seed(self._seed)
        layers = dict(in_backward_optimizer_filter(twin.named_parameters()))
        dense = KeyedOptimizerWrapper(layers, lambda parameters: self._dense_optimizer(list(parameters)))
        optimizer = CombinedOptimizer([twin.fused_optimizer, ("dense", dense)])
        losses = []
        for batch in self._batches[:steps]:
            optimizer.zero_grad()
            losses.append(self._step(twin, batch).item())
            optimizer.step()
            for each in filter(None, after_step):
                each()
        return losses, tensors_of(twin, dense.state_dict()["state"])


def _check(model: DistributedModelParallel, ranks: Ranks) -> None:
    cached = cached_sharders(model)
    if not cached:
        raise ConfigError("verify: no sharder of the model has a cache, so there is nothing to compare.")
    for sharder in cached:
        if not sharder.cache.rows_are_memory:
            raise ConfigError(
                f'cache.host: got "{sharder.cache.host}", needed rows in memory, for both copies of the tables. '
                "Compare with them in memory, or a run with `embershard verify`."
            )
        modes = [str(mode) for mode in sharder._modes if ranks.world_size > 1 or not mode.needs_ranks]
        modes = [each for each in modes if each != "ids" or not sharder.ids]
        if modes:
            raise ConfigError(
                f"verify: got a sharder with {', '.join(modes)}, which adds gradients up in another order than stock "
                'TorchRec, so bits may differ. Compare with exchange="pooled" and mode="sharded", without hot rows.'
            )
    _check_memory(model, ranks)


def _check_memory(model: DistributedModelParallel, ranks: Ranks) -> None:
    """Raise where memory does not hold the tables twice more: on all ranks."""
    own = sum(part.tensor.nbytes for part in parts_of(model, {}).values())
    on_node: list[tuple[int, int]] = ranks.all_gather_objects((ranks.rank // ranks.local_world_size, own))
    of_node = sum(count for node, count in on_node if node == ranks.rank // ranks.local_world_size)
    on_gpu = model.device.type == "cuda"
    needed, free = of_node * (1 if on_gpu else 2), host_memory().available_bytes
    problems = []
    if needed > free:
        problems.append(
            f"two copies of the tables of a node's ranks need {size(needed)} of host memory, and {size(free)} are free"
        )
    if on_gpu and own > (left := torch.cuda.mem_get_info(model.device)[0]):
        problems.append(
            f"stock TorchRec's tables need {size(own)} of rank {ranks.rank}'s GPU, and {size(left)} are free"
        )
    found = [problem for on_rank in ranks.all_gather_objects(problems) for problem in on_rank]
    if found:
        raise ConfigError(f"verify: {found[0]}. Compare a smaller model, as one with fewer rows per table.")

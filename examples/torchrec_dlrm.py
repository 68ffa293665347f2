"""DLRM in plain TorchRec, with the two lines that embershard changes: the sharder and the pipeline.

    torchrun --standalone --nproc_per_node 2 examples/torchrec_dlrm.py
    torchrun --standalone --nproc_per_node 2 examples/torchrec_dlrm.py --stock

The second command trains with TorchRec's sharder and pipeline; the losses are the same, bit for bit. Both commands take
their plan from `plan_sharding`, which calls TorchRec's planner. Used directly, that planner has no cost model for
cached tables on a CPU, and on a GPU it caches only tables that do not fit.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    LookAheadPipeline,
    TableStats,
    cache_stats,
    plan_sharding,
)

FEATURES = ["user", "item", "shop", "brand"]
NUM_DENSE, DIM = 8, 16


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="TorchRec's own sharder and pipeline")
    parser.add_argument("--rows", type=at_least_1, default=50_000, help="rows of each of the four tables")
    parser.add_argument("--ratio", type=share, default=0.1, help="share of the rows that the device holds")
    parser.add_argument("--batch-size", type=at_least_1, default=256, help="samples per rank")
    parser.add_argument("--steps", type=at_least_1, default=200)
    parser.add_argument("--log-every", type=at_least_1, default=20)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("torchrun starts its ranks: torchrun --standalone --nproc_per_node 2 examples/torchrec_dlrm.py")
    return args


def at_least_1(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, needed at least 1")
    return int(text)


def share(text: str) -> float:
    """Read a number in (0, 1]."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, needed a number in (0, 1]")
    return float(text)


def clicks(args: argparse.Namespace) -> Iterator[Batch]:
    """Yield random clicks of this rank: one user, 0 to 3 ids of the rest; low ids are popular; even users click."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        lengths = torch.randint(0, 4, (len(FEATURES), args.batch_size), generator=generator, dtype=torch.int32)
        lengths[0] = 1
        ids = (torch.rand(int(lengths.sum()), generator=generator) ** 4 * args.rows).long()
        dense = torch.randn(args.batch_size, NUM_DENSE, generator=generator)
        users_are_even = ids[: args.batch_size] % 2 == 0
        yield Batch(dense, KeyedJaggedTensor(FEATURES, ids, lengths=lengths.flatten()), users_are_even.float())


def report(step: int, loss: torch.Tensor, model: DistributedModelParallel) -> None:
    """Print the mean loss of all ranks, and the number of rows that steps have waited for so far. Collective."""
    total, late = loss.clone(), sum(stats.critical_path_fills for stats in cache_stats(model))
    dist.all_reduce(total)
    everybodys_late = torch.tensor(late, device=loss.device)
    dist.all_reduce(everybodys_late)
    if dist.get_rank() == 0:
        mean = total.item() / dist.get_world_size()
        print(f"step {step}  loss {mean!r}  waited for {everybodys_late.item()} rows", flush=True)


def summarize(model: DistributedModelParallel) -> None:
    """Print the statistics of all ranks' caches, per table. Collective."""
    found: list[list[TableStats]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, cache_stats(model))
    if dist.get_rank() > 0:
        return
    for stats in (table for tables in found for table in tables):
        print(
            f"{stats.table}: {stats.slots} of {stats.rows} rows on the device, hit rate {stats.hit_rate_lookups:.1%}, "
            f"{stats.fills} fills ({stats.critical_path_fills} on the critical path), {stats.evictions} evictions"
        )


def main() -> None:
    """Train on all ranks that torchrun started."""
    args = arguments()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # With gloo for host memory, what ranks agree on between steps does not queue behind gradients on the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None)
    torch.manual_seed(0)

    tables = [
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=DIM, num_embeddings=args.rows, feature_names=[f])
        for f in FEATURES
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    train_model = DLRMTrain(DLRM(collection, NUM_DENSE, [32, DIM], [32, 1], dense_device=device))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})

    if args.stock:
        sharder = EmbeddingBagCollectionSharder()
    else:
        sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=args.ratio))  # <- the first changed line

    constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    plan = plan_sharding(
        train_model,
        [sharder],
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=device,
        constraints=constraints,
    )
    model = DistributedModelParallel(train_model, device=device, plan=plan, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.002))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])

    if args.stock:
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
    else:
        pipeline = LookAheadPipeline(model, optimizer, device)  # <- the second changed line

    batches, step = clicks(args), 0
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            break
        step += 1
        if step == 1 or step % args.log_every == 0:
            report(step, loss, model)
    summarize(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Reference cycles in the model hold the process group; gloo's threads must end before the interpreter does (pytorch
    # issue 190489).
    gc.collect()

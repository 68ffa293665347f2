"""A TorchRec program over users' histories whose samples are dealt to ranks by what they cost.

    torchrun --standalone --nproc_per_node 2 examples/torchrec_deal.py
    torchrun --standalone --nproc_per_node 2 examples/torchrec_deal.py --slices

A sample with T events costs about a T + b T^2, and the rank with the longest histories decides how long a step takes.
All ranks know the lengths of a global batch, so each keeps those samples that `embershard.deal` gives to it: nothing is
sent, and the losses are those of slices (the second command), but for the order of sums.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import embershard
from embershard import CacheConfig, CachedEmbeddingCollectionSharder, LookAheadPipeline, plan_sharding

ROWS, DIM, MOST_EVENTS, GROUP = 5_000, 16, 200, 8


class Attention(nn.Module):
    """A layer of attention over a history, and its product with the item that is scored."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="t_item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["item", "history"]
        )
        self.tables = EmbeddingCollection([table], device=torch.device("meta"))
        layer = nn.TransformerEncoderLayer(DIM, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.layer = layer.to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss, and loss, logits and labels without gradients. Samples go through the layer in groups by
        length, each padded to its own longest history: else all would cost as much as the longest."""
        looked = self.tables(batch.sparse_features)
        histories, items = looked["history"].to_dense(), looked["item"].values()
        lengths = looked["history"].lengths()
        order = torch.argsort(lengths, stable=True)
        tastes = []
        for group in order.split(GROUP):
            events = pad_sequence([histories[sample] for sample in group.tolist()], batch_first=True)
            is_event = torch.arange(events.shape[1], device=lengths.device) < lengths[group, None]
            seen = self.layer(events, src_key_padding_mask=~is_event) * is_event.unsqueeze(2)
            tastes.append(seen.sum(1) / lengths[group, None])
        logits = (torch.cat(tastes) * items[order]).sum(1)[torch.argsort(order)]
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


@dataclass
class Balance:
    """What the slowest rank's samples cost, over the mean rank's: summed over steps, in slices and as trained."""

    slices: float = 0.0
    trained: float = 0.0
    mean: float = 0.0


def batches(args: argparse.Namespace, balance: Balance) -> Iterator[Batch]:
    """Yield this rank's samples of each global batch, all of which every rank makes, as it would read them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    slices = np.arange(ranks * args.batch_size).reshape(ranks, -1)
    for step in range(args.steps):
        draw = np.random.default_rng((1, step))
        lengths = 1 + (draw.random(ranks * args.batch_size) ** 6 * (MOST_EVENTS - 1)).astype(np.int64)
        ids = [draw.integers(ROWS, size=1 + length) for length in lengths]  # the item, then the history
        labels = np.array([own[0] % 2 == own[1] % 2 for own in ids], np.float32)

        costs = lengths * (5 * DIM + lengths)  # integers, and only their proportions matter
        parts = slices if args.slices else embershard.deal(costs, ranks, seed=step)  # <- the dealing

        for name, dealt in (("slices", slices), ("trained", parts)):
            setattr(balance, name, getattr(balance, name) + costs[dealt].sum(axis=1).max())
        balance.mean += costs.sum() / ranks
        yield as_batch(parts[rank], ids, labels)


def as_batch(samples: NDArray[np.int64], ids: list[NDArray[np.int64]], labels: NDArray[np.float32]) -> Batch:
    """Return some samples of a global batch."""
    items, histories = [ids[sample][:1] for sample in samples], [ids[sample][1:] for sample in samples]
    lengths = torch.tensor([len(bag) for bag in (*items, *histories)], dtype=torch.int32)
    values = torch.from_numpy(np.concatenate([*items, *histories]))
    features = KeyedJaggedTensor(["item", "history"], values, lengths=lengths)
    return Batch(torch.zeros(len(samples), 1), features, torch.from_numpy(labels[samples]))


def main() -> None:
    """Train on all ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", action="store_true", help="each rank trains a slice of the global batch")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("torchrun starts its ranks: torchrun --standalone --nproc_per_node 2 examples/torchrec_deal.py")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None)
    torch.manual_seed(0)

    train_model = Attention(device)
    apply_optimizer_in_backward(torch.optim.SGD, train_model.tables.parameters(), {"lr": 1.0})
    sharder = CachedEmbeddingCollectionSharder(CacheConfig(ratio=0.8))
    places = {"world_size": dist.get_world_size(), "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"])}
    plan = plan_sharding(train_model, [sharder], device=device, **places)
    model = DistributedModelParallel(train_model, device=device, plan=plan, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    # The forward loops over groups, so no tracer finds out what the tables get: all features.
    pipeline = LookAheadPipeline(model, optimizer, device, features=lambda batch: {"tables": batch.sparse_features})

    balance = Balance()
    upcoming = batches(args, balance)
    for step in range(1, args.steps + 1):
        loss, _, _ = pipeline.progress(upcoming)
        if step % args.log_every == 0:
            dist.all_reduce(total := loss.clone())
            if dist.get_rank() == 0:
                print(f"step {step}  loss {total.item() / dist.get_world_size()!r}", flush=True)
    if dist.get_rank() == 0:
        slices, trained = balance.slices / balance.mean, balance.trained / balance.mean
        print(f"the slowest rank's cost over the mean's: {trained:.3f}; in slices {slices:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Reference cycles in the model hold the process group; gloo's threads must end before the interpreter does (pytorch
    # issue 190489).
    gc.collect()

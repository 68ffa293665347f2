"""A plain TorchRec training script. Only the sharder and its plan come from embershard.

torchrun --nproc_per_node 2 examples/train_dlrm.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, cache_stats, plan_sharding

FEATURES, ROWS, DIM, BATCH, STEPS = ["user", "item", "shop"], 50_000, 16, 256, 200


def make_batch(generator: torch.Generator, device: torch.device) -> Batch:
    """Return random clicks: low ids are popular, and users click on even items."""
    ids = (torch.rand(len(FEATURES), BATCH, generator=generator) ** 4 * ROWS).long()
    sparse = KeyedJaggedTensor(FEATURES, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))
    labels = (ids[1] % 2 == 0).float()
    return Batch(torch.randn(BATCH, 4, generator=generator), sparse, labels).to(device)


def main() -> None:
    """Train on all ranks that torchrun started."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # With gloo for host memory, what ranks agree on between steps does not queue behind gradients on the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None)

    tables = [
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES
    ]
    dlrm = DLRM(EmbeddingBagCollection(tables, device=torch.device("meta")), 4, [32, DIM], [32, 1])
    model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(RowWiseAdagrad, dlrm.sparse_arch.parameters(), {"lr": 0.1})

    sharders = [CachedEmbeddingBagCollectionSharder(cache=CacheConfig(ratio=0.1))]  # instead of TorchRec's sharder
    world = dist.get_world_size()
    plan = plan_sharding(model, sharders, world_size=world, local_world_size=world, device=device)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.002)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss, _ = sharded(make_batch(generator, device))
        loss.backward()  # updates the embedding rows, too
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            stats = cache_stats(sharded)
            hit_rate = sum(s.hits_lookups for s in stats) / sum(s.lookups for s in stats)
            print(f"step {step}  loss {loss.item():.4f}  hit rate {hit_rate:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Held-out quality of tables of ids beside hashed tables of as many bytes (docs/ids.md).

    python -m benchmarks.id_quality [--path CRITEO.txt.gz]

A small DLRM learns clicks in their order. In each large table, ids share rows by a hash; or they get rows of their own
and lose them, by rules; or each id that occurs has a row, which takes all the memory it takes. A table of ids has fewer
rows than the hashed one: its map counts, too. Tables of few distinct ids have a row for each of them, everywhere.

Data: generated clicks whose popular ids drift, scored batch by batch before each batch trains, in the last fifth; and
with --path real clicks in Criteo's format: all but the last fifth train, for some epochs, and the last fifth is scored.
Reported per share of the distinct ids that there are rows for: AUC and normalized entropy (NE, lower is better), means
and standard deviations over seeds, and differences to hashing, seed by seed. Collisions, of the first seed: lookups of
hashed tables whose row another id uses, too; scored lookups of tables of ids that have no row of their own.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional.classification import binary_auroc
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import machine, make_parser, report, settings_of, shard, single_process
from benchmarks.step_overhead import FUSED_PARAMS
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, IdTable, id_counts
from embershard.cache.ids.id_map import mixed
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.ids.id_tables import maps_of

Ids = NDArray[np.int64]

_BUCKETS, _FEW = 4, 300
_DENSE = 13
#: Bytes of a row beside its weights: the optimizer's state, and what the map keeps.
_STATE, _MAP, _CANDIDATES = 4, 28, 16
RULES = {
    "ids": IdTable(buckets=_BUCKETS, half_life=200),
    "ids_admit_after_2": IdTable(buckets=_BUCKETS, half_life=200, admit_after=2),
}
VARIANTS = ("hash", *RULES, "row_per_id")


@dataclass(frozen=True)
class Clicks:
    """Labels [N], dense features [N, 13] and ids [N, F], in their order; those from `first_scored` on are scored:
    each before it trains, or all at the end."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: Ids
    first_scored: int
    is_progressive: bool

    @property
    def distinct(self) -> list[int]:
        """Distinct ids of each feature."""
        return [len(np.unique(column)) for column in self.ids.T]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--path", help="real clicks in Criteo's format, gzipped or not")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3], help="rows per distinct id")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=150_000, help="generated")
    parser.add_argument("--epochs", type=int, default=2, help="of real clicks")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    with single_process() as device:
        found = {"drifting": compare(lambda seed: drifting(options.samples, seed), 1, options, device)}
        if options.path:
            clicks = real(options.path)
            found["real"] = compare(lambda _: clicks, options.epochs, options, device)
    settings = {name: value for name, value in settings_of(options).items() if name != "path"}
    report({"benchmark": "id_quality", "settings": settings, **found, "machine": machine()}, options.output)


# -- data


def drifting(samples: int, seed: int, features: int = 8, popular: int = 20_000) -> Clicks:
    """Ids of any 64 bits: new ones come all the time, are popular for a while and go. Each has an effect on clicks of
    its own, which stays."""
    random = np.random.default_rng(seed)
    ranks = random.zipf(1.15, (samples, features)) % popular
    numbers = ranks + (np.arange(samples)[:, None] // 8) // (1 + np.arange(features))  # some features drift faster
    numbers += np.arange(features) << 40
    effects = mixed(numbers.ravel() ^ (seed << 50)).reshape(numbers.shape) / 2.0**63
    dense = random.normal(size=(samples, _DENSE)).astype(np.float32)
    logits = 1.2 * effects.sum(1) + 0.5 * dense[:, 0] - 1.5
    labels = (random.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return Clicks(labels, dense, mixed(numbers.ravel()).reshape(numbers.shape), samples * 4 // 5, True)


def real(path: str) -> Clicks:
    """Clicks in Criteo's format. An empty cell is an id, too, as in any column of texts."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        cells = [line.rstrip("\n").split("\t") for line in file]
    dense = np.array([[float(cell or 0) for cell in line[1:14]] for line in cells], np.float32)
    ids = np.array([[int(cell, 16) + 1 if cell else 0 for cell in line[14:]] for line in cells], np.int64)
    labels = np.array([float(line[0]) for line in cells], np.float32)
    return Clicks(labels, np.log1p(dense.clip(0)), ids, len(cells) * 4 // 5, False)


# -- tables


def tables(clicks: Clicks, variant: str, share: float, dim: int) -> tuple[Ids, list[int], dict[str, IdTable]]:
    """Return ids as the variant's tables take them, their rows, and which of them are tables of ids."""
    ids, rows, rules = np.empty_like(clicks.ids), list[int](), dict[str, IdTable]()
    for feature, distinct in enumerate(clicks.distinct):
        column = clicks.ids[:, feature]
        hashed = max(64, int(share * distinct))
        if distinct <= _FEW or variant == "row_per_id":
            ids[:, feature] = np.unique(column, return_inverse=True)[1]
            rows.append(distinct)
        elif variant == "hash":
            ids[:, feature] = (mixed(column).view(np.uint64) % np.uint64(hashed)).view(np.int64)
            rows.append(hashed)
        else:
            ids[:, feature] = column
            rules[f"t{feature}"] = RULES[variant]
            row = 4 * dim + _STATE
            with_map = row + _MAP + (_CANDIDATES if RULES[variant].admit_after > 1 else 0)
            rows.append(max(8 * _BUCKETS, hashed * row // with_map // _BUCKETS * _BUCKETS))
    return ids, rows, rules


def shared_lookups(clicks: Clicks, ids: Ids) -> float:
    """Return the share of lookups, in features of many ids, whose row another id uses, too."""
    shares = []
    for feature, distinct in enumerate(clicks.distinct):
        if distinct > _FEW:
            pairs = np.unique(np.stack([ids[:, feature], clicks.ids[:, feature]]), axis=1)
            used, number = np.unique(pairs[0], return_counts=True)
            shares.append(np.isin(ids[:, feature], used[number > 1]).mean())
    return round(float(np.mean(shares)), 4)


# -- training


def compare(make: Any, epochs: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train all variants with all seeds."""
    found: dict[str, Any] = {}
    for share in options.shares:
        runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for seed in range(options.seeds):
            clicks = make(seed)
            for variant in VARIANTS:
                runs[variant].append(_run(clicks, variant, share, seed, epochs, options, device))
        found[f"rows_per_id_{share}"] = {variant: _summary(runs[variant], runs["hash"]) for variant in VARIANTS}
    return {"samples": len(clicks.labels), "distinct_ids": clicks.distinct, **found}


def _summary(runs: list[dict[str, float]], hashed: list[dict[str, float]]) -> dict[str, Any]:
    def spread(values: list[float]) -> list[float]:
        return [round(statistics.mean(values), 5), round(statistics.stdev(values) if len(values) > 1 else 0.0, 5)]

    found: dict[str, Any] = {name: spread([run[name] for run in runs]) for name in ("auc", "ne")}
    for name in ("auc", "ne"):
        found[f"{name}_over_hash"] = spread([run[name] - base[name] for run, base in zip(runs, hashed, strict=True)])
    return found | {name: value for name, value in runs[0].items() if name not in ("auc", "ne")}


def _run(
    clicks: Clicks,
    variant: str,
    share: float,
    seed: int,
    epochs: int,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, float]:
    ids, rows, rules = tables(clicks, variant, share, options.dim)
    torch.manual_seed(seed)
    model = _model(rows, rules, seed, options.dim, device)
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer, size = torch.optim.Adam(dense, lr=0.002), options.batch_size
    stop = len(clicks.labels) if clicks.is_progressive else clicks.first_scored
    scores, without_row = list[torch.Tensor](), list[float]()
    for _ in range(epochs):
        for start in range(0, stop, size):
            batch = _batch(clicks, ids, start, min(start + size, stop))
            if clicks.is_progressive and start >= clicks.first_scored:
                scores.append(_score(model, batch))
                without_row.append(_without_row(model, batch[1]))
            optimizer.zero_grad()
            logits = model(*batch[:2]).squeeze(1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[2]).backward()
            optimizer.step()
    if not clicks.is_progressive:
        for start in range(stop, len(clicks.labels), size):
            batch = _batch(clicks, ids, start, min(start + size, len(clicks.labels)))
            scores.append(_score(model, batch))
            without_row.append(_without_row(model, batch[1]))
    scored = torch.cat(scores)
    labels = torch.from_numpy(clicks.labels[len(clicks.labels) - len(scored) :])
    found = {"auc": float(binary_auroc(scored, labels.long())), "ne": _normalized_entropy(scored, labels)}
    found["mebibytes"] = round(num_bytes(rows, rules, options.dim) / 2**20, 3)
    if rules:
        counts = id_counts(model).values()
        found["scored_without_row"] = round(statistics.mean(without_row), 4)
        found |= {"live_ids": sum(each.live for each in counts), "evicted_ids": sum(each.evicted for each in counts)}
    else:
        found["shared_lookups"] = shared_lookups(clicks, ids)
    return found


def _model(rows: list[int], rules: dict[str, IdTable], seed: int, dim: int, device: torch.device) -> Any:
    configs = [
        EmbeddingBagConfig(name=f"t{feature}", embedding_dim=dim, num_embeddings=number, feature_names=[f"f{feature}"])
        for feature, number in enumerate(rows)
    ]
    bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
    parameters = dict(FUSED_PARAMS, learning_rate=0.05)
    sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=1.0), None, parameters, init_seed=seed, ids=rules)
    return shard(DLRM(bags, _DENSE, [64, 32, dim], [128, 64, 1], dense_device=device), sharder, device, "table_wise")


def _batch(clicks: Clicks, ids: Ids, start: int, stop: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    part = torch.from_numpy(np.ascontiguousarray(ids[start:stop].T)).flatten()
    keys = [f"f{feature}" for feature in range(ids.shape[1])]
    features = KeyedJaggedTensor(keys, part, lengths=torch.ones(len(part), dtype=torch.int64))
    return torch.from_numpy(clicks.dense[start:stop]), features, torch.from_numpy(clicks.labels[start:stop])


@torch.no_grad()
def _score(model: Any, batch: tuple[Any, Any, Any]) -> torch.Tensor:
    return torch.sigmoid(model(*batch[:2]).squeeze(1))


def _without_row(model: Any, features: KeyedJaggedTensor) -> float:
    """Return the share of lookups in tables of ids that have no row of their own."""
    shares, parts = [0.0], features.to_dict()
    for pool in cached_embeddings(model):
        for ids in maps_of(pool):
            rows = ids.find(mixed(parts[f"f{ids.table[1:]}"].values().numpy()))
            shares.append(float((rows % (ids.num_rows // _BUCKETS) == 0).mean()))
    return sum(shares) / max(1, len(shares) - 1)


def _normalized_entropy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    rate = labels.mean().expand_as(labels)
    loss = torch.nn.functional.binary_cross_entropy
    return float(loss(scores.double(), labels.double()) / loss(rate.double(), labels.double()))


def num_bytes(rows: list[int], rules: dict[str, IdTable], dim: int) -> int:
    maps = {name: _MAP + (_CANDIDATES if rule.admit_after > 1 else 0) for name, rule in rules.items()}
    return sum(number * (4 * dim + _STATE + maps.get(f"t{feature}", 0)) for feature, number in enumerate(rows))


if __name__ == "__main__":
    main()

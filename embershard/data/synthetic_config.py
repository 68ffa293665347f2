"""`SyntheticConfig`: the settings of generated samples."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.data.config_fields import check_fields, freeze_lists
from embershard.settings.resume_rules import OfModel, OfTraining

NUM_CRITEO_SPARSE = 26


@dataclass(frozen=True)
class SyntheticConfig:
    """Samples drawn from the popularity statistics of the Criteo Kaggle data set.

    >>> SyntheticConfig(bag_sizes=[2]).bag_sizes
    (2,)
    """

    num_samples: OfTraining[int] = 1_000_000
    """Samples in an epoch, the held-out part included. Every epoch has the same samples."""
    scale: OfModel[float] = 0.01
    """Rows of every table relative to Criteo Kaggle (1.0: 26 tables, 33,762,577 rows); at least 3 each."""
    num_dense: OfModel[int] = 13
    """Dense features of a sample."""
    bag_sizes: OfTraining[tuple[int, ...]] = ()
    """Ids per sample and table: empty = 1 each; one number = the same for all tables; or a number per table.
    The first id of a bag is drawn, the others are a fixed function of it (as MLPerf makes multi-hot data)."""
    drift: OfTraining[float] = 0.0
    """Share of the popularity ranks that belong to another row at the end of an epoch than at its start."""
    locality: OfTraining[float] = 1.0
    """Share of the lookups that follow the published popularity. The others go to all rows alike: 0 is uniform."""
    correlation: OfTraining[float] = 0.0
    """Correlation in [0, 1) of the features' popularity in a sample: with 0 they are drawn independently; the larger,
    the more samples have popular rows only, or rare rows in many features. Popularity of a single feature stays."""
    rarity_logit: OfTraining[float] = 0.0
    """Change of the hidden model's logit per standard deviation of a sample's rarity: with a positive number, samples
    of popular rows are clicked less often. Needs `correlation`."""
    signal: OfTraining[float] = 2.0
    """Standard deviation of the hidden model's logit: the larger, the higher the AUC that can be reached."""
    click_rate: OfTraining[float] = 0.224
    """Share of samples with label 1."""
    id_rows: OfModel[int | None] = None
    """Capacity of tables that take any id: those with more rows than this by `scale`, which says how many ids are alive
    at a time. Their ids are any of 64 bits. Default: ids are rows."""
    id_turnover: OfTraining[float] = 0.0
    """With `id_rows`: how often each id is replaced by a new one in the course of an epoch, on average."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        is_bags = len(self.bag_sizes) in (0, 1, NUM_CRITEO_SPARSE) and all(size >= 1 for size in self.bag_sizes)
        check_fields(
            self,
            "synthetic.",
            num_samples=(self.num_samples >= 1, "at least 1"),
            scale=(0 < self.scale <= 100, "a number in (0, 100]"),
            num_dense=(self.num_dense >= 1, "at least 1"),
            bag_sizes=(is_bags, f"no number, 1 number or {NUM_CRITEO_SPARSE} numbers, each at least 1"),
            drift=(0 <= self.drift <= 1, "a number in [0, 1]"),
            locality=(0 <= self.locality <= 1, "a number in [0, 1]"),
            correlation=(0 <= self.correlation < 1, "a number in [0, 1)"),
            rarity_logit=(
                -5 <= self.rarity_logit <= 5 and (self.rarity_logit == 0 or self.correlation > 0),
                "a number in [-5, 5], and 0 without synthetic.correlation",
            ),
            signal=(0 < self.signal <= 10, "a number in (0, 10]"),
            click_rate=(0 < self.click_rate < 1, "a number in (0, 1)"),
            id_rows=(self.id_rows is None or self.id_rows >= 1, "at least 1, or nothing"),
            id_turnover=(
                self.id_turnover == 0 or (self.id_turnover > 0 and self.id_rows is not None),
                "0 without synthetic.id_rows, else at least 0",
            ),
        )

"""Messages about settings of models, their losses and optimizers; and about models of one's own, their modules and
functions."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.commands.remedies.table import FILES, LEFT_OUT, TABLE, TINY, Remedy, cases, check, of_settings

FILES["labels.toml"] = (
    TABLE.format("results.csv")
    .replace("features.price", "# features.price")
    .replace('"click"', '["click", "purchased"]')
)

OF_MODELS = [
    *(of_settings("tiny.toml", *row) for row in (
        ("model.arch=dlm", "needed .*(dlrm)", "model.arch=dlrm"),
        ("model.table_dtype=fp64", "needed .*(fp16)", "model.table_dtype=fp16"),
        ("model.init_range=-1", "needed a number (above 0)", "model.init_range=1"),
        ("model.dense_arch_layer_sizes=[]", "needed (at least one layer)", "model.dense_arch_layer_sizes=[4]"),
        ("model.dense_arch_layer_sizes=[8,7]", r"For instance (\[8, 4\])", "model.dense_arch_layer_sizes=[8,4]"),
        ("model.over_arch_layer_sizes=[8,2]", r"For instance (\[8, 1\])", "model.over_arch_layer_sizes=[8,1]"),
        ("model.dcn_num_layers=2", '(model.arch = "dlrm_dcn")', "model.arch=dlrm_dcn"),
        ("model.dcn_num_layers=2", "(Remove it)", LEFT_OUT),
        ("model.arch=dlrm_dcn model.dcn_low_rank_dim=0", "needed at least (1)", "model.dcn_low_rank_dim=1"),
        ("model.dropout=1", "from (0 to below 1)", "model.dropout=0.5"),
        ("model.dropout=0.1 model.over_arch_layer_sizes=[1]", "(over_arch_layer_sizes) has no hidden",
            "model.over_arch_layer_sizes=[8,1]"),
        ("model.activation=prelu", "Leave it out, which is '(relu)'", "model.activation=relu"),
        ("model.activation=prelu", "(Leave it out)", LEFT_OUT),
        ("model.activation=gelu", "needed .*(relu)", "model.activation=relu"),
        ("model.arch=deepfm", r"dense_arch_layer_sizes.*Leave it out, which is (.64, 16.)",
            "model.dense_arch_layer_sizes=[64,16]"),
        ("model.arch=fm model.dense_arch_layer_sizes=[64,16]", "over_arch_layer_sizes.*Leave it out, which is (.*])",
            "model.over_arch_layer_sizes=[64,32,1]"),
        ("model.interaction=dlrm", "(Remove it)", LEFT_OUT),
        ("model.num_experts=2", "set model.arch to ('mmoe')", "model.arch=mmoe",
            "train {} --dry-run --set data.synthetic.scale=0.0001"),
        ("model.label_weighting=best", "needed .*(fixed)", "model.label_weighting=fixed"),
        ("model.target=[a]", 'set model.arch to "(din)"', "model.arch=din model.history=[b]"),
        ("model.arch=din", r"For instance (target = \[\"item\"\])", "model.target=[item] model.history=[hist]"),
        ("model.arch=hstu model.target=[a] model.history=[b] model.history_layer_sizes=[3]", "(Remove it)",
            "model.history_layer_sizes=none"),
        ("model.arch=din model.target=[a] model.history=[b] model.history_layer_sizes=[0]", "width (1) or more",
            "model.history_layer_sizes=[1]"),
        ("model.hstu.num_layers=3", 'set model.arch to "(hstu)"', "model.arch=hstu model.target=[a] model.history=[b]"),
        ("model.hstu.num_layers=0", "needed at least (1)",
            "model.arch=hstu model.hstu.num_layers=1 model.target=[a] model.history=[b]"),
        ("model.hstu.linear_dropout=1", "from (0 to below 1)", "model.hstu.linear_dropout=0"),
        ("model.hstu.times=[a]", 'For instance (."time", "hist_time".)',
            "model.arch=hstu model.target=[a] model.history=[b] model.hstu.times=[time,hist_time]",
            "train {} --dry-run", 'needed "parquet" or "table"'),
        ("model.hstu.window=999999", "(Remove it)", LEFT_OUT),
        ("model.hstu.window=999999", "or make it (smaller)",
            "model.arch=hstu model.hstu.window=2 model.target=[a] model.history=[b]"),
        ("model.folder=.", "(Remove it), or set model.build", LEFT_OUT),
        ("model.build=mine", 'for instance "(my_model:build)"', "model.build=my_model:build", "train {} --dry-run",
            "Remove one"),
    )),
    *(of_settings("labels.toml", *row) for row in (
        ("model.arch=mmoe model.funnel=[click]", r"(\[\"click\", \"buy\"\])",
            "model.arch=mmoe model.funnel=[click,purchased]"),
        ("model.arch=mmoe model.funnel=[click,buy]", "binary labels among click, (purchased)",
            "model.funnel=[click,purchased]"),
        ("model.arch=mmoe model.expert_layer_sizes=[0]", "width (1) or more", "model.expert_layer_sizes=[1]"),
        ("model.arch=mmoe model.num_experts=-1", "needed at least (1)", "model.num_experts=1"),
        ("model.label_weighting=uncertainty data.table.label_weights=[1,2]", "(Remove one)",
            "data.table.label_weights=none"),
        ("model.arch=mmoe data.table.label=click", "Name more in (data.table.label)",
            "data.table.label=[click,purchased]"),
        ("model.arch=mmoe data.table.label=click", "(leave it out)", "model.arch=dlrm"),
        ("model.funnel=[click]", r"got \['click'\].* set model.arch to .*('mmoe')",
            "model.arch=mmoe model.funnel=[click,purchased]"),
        ("model.arch=fm model.dense_arch_layer_sizes=[64,16] model.over_arch_layer_sizes=[64,32,1] "
            "model.embedding_dim=4 "
            "data.table.label=purchased data.table.task=multiclass data.table.classes.purchased=[0,1,2,3,4]",
                r"Needed at least (8)\.", "model.embedding_dim=8"),
    )),
    *(of_settings("tiny.toml", *row) for row in (
        ("embedding_optimizer.kind=lion", "needed .*(adam)", "embedding_optimizer.kind=adam"),
        ("dense_optimizer.kind=lion", "needed .*(adam)", "dense_optimizer.kind=adam"),
        ("dense_optimizer.lr=0", "needed (more than 0)", "dense_optimizer.lr=0.1"),
        ("dense_optimizer.clip_norm=0", "more than 0, or (none)", "dense_optimizer.clip_norm=none"),
        ("embedding_optimizer.kind=adam embedding_optimizer.betas=[1,1]", "at least 0 and (below 1)",
            "embedding_optimizer.betas=[0.9,0.99]"),
        ("embedding_optimizer.kind=sgd embedding_optimizer.betas=[0.9,0.9]", "(remove it)",
            "embedding_optimizer.betas=none"),
        ("schedule.warmup_steps=-1", "needed (0) or more", "schedule.warmup_steps=0"),
        ("schedule.decay=step schedule.decay_steps=3", "needed .*(linear)", "schedule.decay=linear"),
        ("schedule.decay_steps=3", "remove it or (set both)", "schedule.decay=linear"),
        ("schedule.decay_steps=3", "(remove it)", LEFT_OUT),
        ("schedule.decay=linear schedule.decay_steps=-1", "needs (1) or more", "schedule.decay_steps=1"),
        ("schedule.decay=linear schedule.decay_steps=3 schedule.warmup_steps=9 schedule.decay_start=2",
            "warmup_steps=(9) or more", "schedule.decay_start=9"),
        ("schedule.decay=linear schedule.decay_steps=3 schedule.floor=2", "from (0 to 1)", "schedule.floor=0.1"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_MODELS))
def test_what_is_advised_of_models_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


_PREAMBLE = """
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig


class Model(nn.Module):
    def __init__(self, tables, *, device="meta", is_weighted=False, outputs=1):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device(device), is_weighted=is_weighted)
        self.last = nn.Linear(sum(each.embedding_dim * len(each.feature_names) for each in tables), outputs)

    def forward(self, batch):
        return self.last(self.bags(batch.sparse_features).values())


def _tables(schema, dim=4, rows=None):
    return [
        EmbeddingBagConfig(
            name=f"t_{each.name}", num_embeddings=rows or each.num_rows, embedding_dim=dim, feature_names=[each.name]
        )
        for each in schema.sparse
    ]
"""
#: Functions that return something else than a model that can be trained, and one that returns such a model.
_FUNCTIONS = {
    "build": "return Model(_tables(schema))",
    "fails": "return Model(_tables(schema), layers=3)",
    "a_number": "return 7",
    "without_tables": "return nn.Linear(2, 1)",
    "in_memory": 'return Model(_tables(schema), device="cpu")',
    "weighted": "return Model(_tables(schema), is_weighted=True)",
    "narrow": "return Model(_tables(schema, dim=6))",
    "short": "return Model(_tables(schema, rows=2))",
    "one_less": "return Model(_tables(schema)[1:])",
    "twice": "return nn.Sequential(Model(_tables(schema)), Model(_tables(schema)))",
    "others": 'tables = _tables(schema); tables[0].feature_names = ["age"]; return Model(tables)',
    "three": "return Model(_tables(schema), outputs=3)",
}
_MODULE = _PREAMBLE + "".join(f"\n\ndef {name}(schema, options):\n    {body}\n" for name, body in _FUNCTIONS.items())
FILES |= {
    "own.toml": re.sub(r"\[model\].*?\[cache\]", "[cache]", TINY, flags=re.DOTALL),
    "ours.py": _MODULE,
    "colorsys.py": _MODULE,
    "imports.py": "import no_such_module\n",
    "typo.py": f"{_MODULE}\nno_such_name\n",
}
_PROFILE, _TRAIN = "profile --config own.toml -o out.npz", "train own.toml"
_BUILD = "--set model.build=ours:build"


def _rename(_: str) -> None:
    Path("colorsys.py").rename("my_model.py")


OF_OWN_MODELS = [
    *(
        Remedy((_PROFILE,), "", f"--set model.build={build}", said, tried, True)
        for build, said, tried in (
            ("ours:fails", r"unexpected keyword argument 'layers' .*(ours\.py, line \d+)", _BUILD),
            ("ours:a_number", r"needed a (torch\.nn\.Module)", _BUILD),
            ("ours:without_tables", "needed a torchrec (EmbeddingBagCollection)", _BUILD),
            ("ours:in_memory", r'make it with (device=torch\.device\("meta"\))', _BUILD),
            ("ours:weighted", "make it with (is_weighted=False)", _BUILD),
            ("ours:narrow", "needed a (multiple of 4)", _BUILD),
            ("ours:short", r"rows \((feature\.num_rows)\)", _BUILD),
            ("ours:one_less", "(Give it one), or leave it out", _BUILD),
            ("ours:twice", "so (rename one)", _BUILD),
            ("ours:others", "they have (C1), C2", _BUILD),
            ("ours:model", "it has (build), fails", _BUILD),
            ("imports:build", "imports '(no_such_module)', which is not installed", _BUILD),
            ("typo:build", r"(typo\.py, line \d+)", _BUILD),
            ("my:build", r"(Name a file there) without \.py", _BUILD),
        )
    ),
    Remedy((_PROFILE,), "", "--set model.build=colorsys:build", "(Give that another name)",
        "--set model.build=my_model:build", True, done=_rename),
    Remedy((_TRAIN,), "", "--run-dir one --set model.build=ours:three", r"needed logits (\[20\])",
        f"--run-dir two {_BUILD}", True),
]  # fmt: skip


@pytest.fixture
def forgets_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a folder, and modules, of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("ours", "imports", "typo", "my_model"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases(OF_OWN_MODELS))
def test_what_is_advised_of_own_models_helps(
    row: Remedy, command: str, one_rank_here: None, forgets_modules: None, capsys: pytest.CaptureFixture[str]
):
    check(row, command, capsys)

"""Messages about settings of models, their losses and optimizers."""

from __future__ import annotations

import pytest

from tests.unit.commands.remedies.table import FILES, LEFT_OUT, TABLE, Remedy, cases, check, of_settings

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

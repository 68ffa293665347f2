"""Messages about settings."""

from __future__ import annotations

import pytest

from tests.unit.commands.remedies.table import DRY_RUN, FILES, LEFT_OUT, Remedy, cases, check, of_settings

_DRY, _VALIDATE = ("train {} --dry-run", "verify {} --nproc 1"), ("data validate --config {}",)
_TRAIN = _DRY[:1]

OF_SETTINGS = [
    Remedy(_TRAIN, "tiny.toml", "--set train.global_batch_size=20", "(--set train.global_batch_size=none)"),
    Remedy(_TRAIN, "tiny.toml", "--set train.global_batch_size=20", "(--set train.batch_size=none)"),
    Remedy(
        _TRAIN, "tiny.toml", "--nproc 2 --set train.batch_size=none --set train.global_batch_size=21",
        r"for instance (20)\.", "--set train.global_batch_size=20",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set train.batchsize=3",
        "Did you mean (train.batch_size)", "--set train.batch_size=3", True,
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set batch_size=3",
        "Did you mean (train.batch_size)", "--set train.batch_size=3", True,
    ),
    Remedy(_TRAIN, "tiny.toml", "--batch-size 3", "Did you mean (--set train.batch_size=3)", instead=True),
    Remedy(_TRAIN, "tiny.toml", "train.batch_size=3", r"Did you mean (--set train.batch_size=3)\?", instead=True),
    Remedy(_TRAIN, "tiny.toml", "--set train.batch_size", r"for instance (--set train.batch_size=\d+)", instead=True),
    Remedy(
        _TRAIN, "tiny.toml", "--set model.embedding_dim=6", r"The next one is (8)\.",
        "--set model.embedding_dim=8 --set model.dense_arch_layer_sizes=[8,8]", True,
    ),
    Remedy(_TRAIN, "tiny.toml", "--set sharding.exchange=auto", 'needed ("pooled")', "--set sharding.exchange=pooled"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.host=file", "needs (cache.host_dir).*, and cache.host_bytes",
        "--set cache.host_dir=rows --set cache.host_bytes=1000000",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set cache.host_dtype=int8", "(cache.full_rows = 0)", "--set cache.full_rows=0"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.host_dtype=int8",
        "(profile.samples = 200000)", "--set profile.samples=200000",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set cache.host_dtype=int8", '("fp16") needs none', "--set cache.host_dtype=fp16"),
    Remedy(_TRAIN, "tiny.toml", "--set cache.device_bytes=1000000", "(Remove the other)", "--set cache.ratio=none"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.decay=0.5 --set cache.policy=lru",
        'belongs to ("lfu")', "--set cache.policy=lfu",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set train.metric=auc",
        "without (checkpoint.keep_best)", "--set checkpoint.keep_best=true",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set profile.path=p.npz --set profile.samples=9", "(--set profile.samples=none)"),
    Remedy(
        _TRAIN, "tiny.toml", "--set look_ahead.prefetch=99",
        "(look_ahead.lookahead)", "--set look_ahead.lookahead=99",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set schedule.decay=linear",
        "schedule.(decay_steps)", "--set schedule.decay_steps=5",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set publish.folder=p", "needs (publish.every_steps)", "--set publish.every_steps=2"),
    Remedy(_TRAIN, "tiny.toml", "--set publish.every_steps=2", "without (publish.folder)", "--set publish.folder=p"),
    Remedy(_TRAIN, "tiny.toml", "--set train.precision=fp16", '("bf16") is as fast', "--set train.precision=bf16"),
    Remedy(_TRAIN, "tiny.toml", "--resume", "needs (--run-dir)", "--run-dir new"),
    Remedy(_TRAIN, "tiny.toml", "--allow-change data.seed --run-dir new", "without (--resume)", "--resume"),
    Remedy(
        _TRAIN, "tiny.toml", "--allow-change data.sed --run-dir new --resume", "Did you mean (data.seed)",
        "--allow-change data.seed --run-dir new --resume", True,
    ),
    Remedy(
        _TRAIN, "city.toml", "--set metrics.group=user_id --set metrics.names=[auc]",
        'add ("gauc")', "--set metrics.names=[auc,gauc]",
    ),
    Remedy(_TRAIN, "city.toml", "--set metrics.names=[gauc]", "(metrics.group) = ", "--set metrics.group=user_id"),
    Remedy(
        _TRAIN, "city.toml", "--set metrics.most_slices=3",
        "without (metrics.slices)", "--set metrics.slices=[user_id]",
    ),
    Remedy(_VALIDATE, "bad.toml", "", "(--set data.bad_rows=[\\d.]+)", wrong_code=1),
    Remedy(_VALIDATE, "near.toml", "", "(--set data.bad_rows=[\\d.]+)", wrong_code=1),
    Remedy(("data validate",), "", "", "or (--config)", "--config bad.toml --set data.bad_rows=0.5"),
    Remedy(("train bad.csv --dry-run",), "", "--label click --label user_id", "(give one)", "--label click", True),
    Remedy(("export nowhere -o out",), "", "--dtype int8 --format parquet", "(Leave it out)", "--help", True),
]  # fmt: skip
#: A folder that is followed.
FILES |= {"stream/a.csv": FILES["city.csv"], "nothing.csv": ""}

OF_CACHES = [
    *(of_settings("tiny.toml", *row) for row in (
        ("cache.ratio=2", "(0.015) keeps", "cache.ratio=0.015"),
        ("cache.policy=static cache.warmup=false profile.samples=100", "(remove cache.warmup)", "cache.warmup=none"),
        ("cache.policy=lru cache.warmup=false profile.samples=100", "(drop one)", "profile.samples=none"),
        ("cache.policy=lrru", 'one of .*.(lru).', "cache.policy=lru"),
        ("cache.policy_folder=.", r'without (cache.policy = "module:function")', LEFT_OUT),
        ("cache.decay=1 cache.policy=lfu", "(0.999) halves", "cache.decay=0.999"),
        ("cache.transfer=triton_uva cache.host=mmap cache.host_dir=rows", '(cache.transfer="staged")',
            "cache.transfer=staged"),
        ("cache.transfer=triton_uva cache.host=mmap cache.host_dir=rows", 'or (cache.host="memory")',
            "cache.host=memory cache.host_dir=none"),
        ("cache.host_dir=rows", '(cache.host="file") or "mmap"', "cache.host=mmap"),
        ("cache.host_dir=rows", "or (remove it)", LEFT_OUT),
        ("cache.host_bytes=1000000", "or (neither)", LEFT_OUT),
        ("cache.host=file cache.host_dir=rows", "set both .* and (host_bytes)", "cache.host_bytes=1000000"),
        ("cache.host=file cache.host_dir=rows cache.host_bytes=1000000 cache.policy=lru", "(Leave it out)",
            "cache.policy=none"),
        ("cache.host=file cache.host_dir=rows cache.host_bytes=1000000 cache.host_dtype=fp16", "(Leave it out)",
            "cache.host_dtype=fp32"),
        ("cache.host=file cache.host_dir=rows cache.host_bytes=1000000 look_ahead.lookahead=0", "needed (1) or more",
            "look_ahead.lookahead=4"),
        ("cache.full_rows=0.1", "(remove it)", LEFT_OUT),
        ("cache.host_dtype=fp16 cache.enabled=false", 'set "(fp32)"', "cache.host_dtype=fp32"),
        ("cache.host_dtype=fp16 cache.enabled=false", "or (use the cache)", "cache.enabled=true"),
        ("cache.host_dtype=fp16 model.table_dtype=fp16", 'needed "(fp32)"', "model.table_dtype=fp32"),
        ("cache.host_dtype=fp16 train.init=torchrec", 'needed "(counter)"', "train.init=counter"),
        ("cache.enabled=false sharding.mode=data_parallel", "needed (true)", "cache.enabled=true"),
        ("look_ahead.prefetch=99", "(Lower the one)", "look_ahead.prefetch=1"),
        ("look_ahead.lookahead=-1", "needed (0) or more", "look_ahead.lookahead=0"),
        ("sharding.mode=hot_cold", "needed both .* (hot_bytes), or", "sharding.hot_bytes=1000"),
        ("sharding.mode=hot_cold", "(or neither)", LEFT_OUT),
        ("sharding.hot_bytes=1000", 'needed both (mode="hot_cold")', "sharding.mode=hot_cold"),
        ("sharding.mode=hot_cold sharding.hot_bytes=1000 look_ahead.lookahead=500", "(Lower one)",
            "look_ahead.lookahead=4"),
        ("sharding.mode=data_parallel sharding.exchange=rows", "(Remove one)", "sharding.exchange=pooled"),
        ("sharding.mode=data_parallel sharding.forward_dtype=fp16", "(Remove one)", "sharding.forward_dtype=fp32"),
        ("sharding.device_bytes=0", "needed (1) or more", "sharding.device_bytes=100000000"),
        ("sharding.pin.t_C1.type=row_wise", r"(embershard plan)\), and", "sharding.pin=none", DRY_RUN, "is a section"),
        ("sharding.pin.t_C1.ranks=[-1]", "needed ranks of (0) or more", "sharding.pin.t_C1.ranks=[0]", DRY_RUN,
            "without a plan"),
        ("sharding.pin.t_C1.kernel=slow", '"(cached)"', "sharding.pin.t_C1.kernel=cached", DRY_RUN, "without a plan"),
        ("publish.every_steps=2 publish.every_seconds=3 publish.folder=p", "(Remove one)",
            "publish.every_seconds=none"),
        ("publish.folder=p", r"or (publish\.every_seconds)", "publish.every_seconds=3"),
        ("publish.folder=p publish.every_steps=2 publish.keep_bases=3", "without (publish.base_every)",
            "publish.base_every=2"),
        ("publish.folder=p publish.every_steps=0", "needed at least (1)", "publish.every_steps=1"),
        ("checkpoint.every_steps=0", "needed at least (1)", "checkpoint.every_steps=1"),
        ("checkpoint.full_every=2", "without (checkpoint.every_steps)", "checkpoint.every_steps=2"),
        ("checkpoint.on_failed_save=continue", "or (checkpoint.keep_best)", "checkpoint.keep_best=true"),
        ("checkpoint.on_failed_save=retry", '"(continue)"',
            "checkpoint.on_failed_save=continue checkpoint.every_steps=2"),
        ("train.ema=2", r"instance (0\.999)", "train.ema=0.999"),
        ("train.epochs=0", "needed at least (1)", "train.epochs=1"),
        ("train.init=zeros", '"(counter)"', "train.init=counter"),
        ("train.precision=fp8", '"(bf16)"', "train.precision=bf16"),
        ("train.on_non_finite=go", '"(skip)"', "train.on_non_finite=skip"),
        ("train.device=gpu", '"(cuda)"', "train.device=cpu"),
        ("train.accumulate=30", "at most the (20) samples", "train.accumulate=20"),
        ("train.eval_every=2 data.eval_fraction=0", r"(data\.eval_fraction) is 0", "data.eval_fraction=0.1"),
        ("checkpoint.keep_best=true data.eval_fraction=0", r"(data\.eval_fraction) is 0", "data.eval_fraction=0.1"),
        ("train.metric=acu checkpoint.keep_best=true", "needed one of .*(auc)", "train.metric=auc"),
        ("metrics.names=[acu]", "needed some of .*(auc)", "metrics.names=[auc]"),
        ("metrics.names=[recalibrated_ne]", r"(metrics\.recalibration) and", "metrics.recalibration=0.1"),
        ("metrics.recalibration=0 metrics.names=[recalibrated_ne]", "a number (above 0)", "metrics.recalibration=0.1"),
        ("metrics.names=[auc,auc]", "(each once)", "metrics.names=[auc]"),
        ("metrics.folder=.", '"(module:function)" in metrics.names', LEFT_OUT),
        ("metrics.group=user", "(Leave it out), or read", LEFT_OUT),
        ("metrics.names=[mse]", "needed .*(logloss|auc)", "metrics.names=[auc]"),
        ("tracking.trackers=[wandbb]", "needed .*(wandb)", "tracking.trackers=none"),
        ("tracking.trackers=[wandb]", r'pip install "(wandb\S*)", or leave it out', "tracking.trackers=none"),
        ("tracking.trackers=[mlperf]", "(Leave it out)", "tracking.trackers=none"),
        ("tracking.prometheus_port=9999", 'without "(prometheus)"', LEFT_OUT),
        ("tracking.mlperf_org=me", 'without "(mlperf)"', LEFT_OUT),
        ("train.epochs=2=3", "needed (integer)", "train.epochs=2"),
        ("train=3", "as (train.NAME=VALUE)", "train.epochs=3", DRY_RUN, "", True),
        ("train.batch_size.x=3", "(train.batch_size) is a setting", "train.batch_size=3", DRY_RUN, "", True),
        ("train.epochs=1e999", "needed .*(integer|finite)", "train.epochs=1"),
    )),
]  # fmt: skip

OF_SAMPLES = [
    *(of_settings("tiny.toml", *row) for row in (
        ("data.path=x", r"(set data\.kind) to use it", LEFT_OUT),
        ("data.eval_fraction=2", "a number in (.0, 1.)", "data.eval_fraction=1"),
        ("data.chunk_rows=0", "at least (1)", "data.chunk_rows=1"),
        ("data.chunk_rows=1 data.synthetic.num_samples=999999999999", "needed at most ([\\d,]+)",
            "data.synthetic.num_samples=600"),
        ("data.kind=table data.table.features.user_id.kind=sparse data.table.features.user_id.mapping=hash "
            "data.table.features.user_id.num_rows=9 data.table.label=click",
            r"needs (data\.path)", "data.path=city.csv"),
        ("data.kind=parquet data.path=city.csv", r"needs (data\.parquet\.sparse)",
            "data.parquet.sparse=[user_id] data.parquet.num_rows=[9]", DRY_RUN, "embershard: "),
        ("data.time.window=9", r"without (data\.time\.column)", LEFT_OUT),
        ("data.time.column=when data.time.window=3600", '"(table)" or "parquet" in time order',
            "data.time.column=none data.time.window=none"),
        ("data.idle_seconds=3", r"no folder is followed \((data.follow)\)", LEFT_OUT),
        ("data.bad_files=skip", 'needed nothing, or "(stop)"', "data.bad_files=stop"),
        ("data.split=hash", '"tail" or "(random)"', "data.split=random"),
        ("data.split_seed=3", "needed (0): it has no effect", "data.split_seed=0"),
        ("data.synthetic.id_rows=192 data.synthetic.id_turnover=0.5 sharding.mode=data_parallel",
            "needed '(sharded)'", "sharding.mode=sharded"),
        ("ids.C3.ttl_steps=3", "Give a feature the mapping .*or (remove it)", LEFT_OUT),
        ("data.synthetic.id_rows=192 profile.samples=100", "Remove .*(profile.samples) and", "profile.samples=none"),
        ("data.synthetic.id_rows=192 train.accumulate=2 look_ahead.lookahead=0", "needed (1) or more",
            "look_ahead.lookahead=2"),
        ("data.synthetic.id_rows=192 ids.C77.ttl_steps=3", r"needed one of (C3),.*or \*", LEFT_OUT),
        ("data.synthetic.id_rows=192 ids.C3.admit_after=2 ids.C3.admit_probability=0.5", "(Remove the other)",
            "ids.C3.admit_probability=none"),
        ("data.synthetic.id_rows=192 ids.C3.half_life=3 ids.C3.eviction=lru", 'needed "(lfu)"', "ids.C3.eviction=lfu"),
        ("data.synthetic.id_rows=192 ids.C3.admit_probability=1e-18", "needed at least .*(larger one)",
            "ids.C3.admit_probability=0.5"),
        ("data.synthetic.id_rows=192 ids.C3.reserve=2", "between (0 and 1)", "ids.C3.reserve=0.1"),
        ("data.synthetic.id_rows=192 ids.*.buckets=7", "Give the table (\\d+) rows", "data.synthetic.id_rows=196"),
        ("data.synthetic.id_rows=192 ids.*.buckets=7", "or set another number of (buckets)", "ids.*.buckets=8"),
    )),
    *(of_settings("city.toml", *row) for row in (
        ("data.time.column=user_id", r"(data\.time\.window)", "data.time.window=3600"),
        ("data.time.column=user_id data.time.window=3600 train.epochs=2", "needed (1) in time order", "train.epochs=1"),
        ("data.time.column=user_id data.time.window=3600 data.split=random", 'needed "(tail)"', "data.split=tail"),
        ("data.time.column=user_id data.time.window=3600 data.eval_fraction=0.5", r"needed (0\.1), the default",
            "data.eval_fraction=0.1"),
        ("data.time.column=user_id data.time.window=3600 sharding.mode=hot_cold sharding.hot_bytes=999",
            "(--set sharding.mode=sharded --set sharding.hot_bytes=none)",
                "sharding.mode=sharded sharding.hot_bytes=none"),
        ("data.time.column=user_id data.time.window=3600 sharding.mode=hot_cold sharding.hot_bytes=999",
            "or (--set data.time.column=none --set data.time.window=none)",
                "data.time.column=none data.time.window=none"),
        ("data.follow=true", r"(data\.time\.column) and data.time.window",
            "data.time.column=user_id data.time.window=9 data.path=stream"),
        ("data.follow=true data.time.column=user_id data.time.window=9", "no such (folder)", "data.path=stream"),
        ("data.follow=true data.time.column=user_id data.time.window=9 data.path=stream profile.samples=9",
            "(set profile.path)", "profile.samples=none"),
        ("data.follow=true data.time.column=user_id data.time.window=9 data.path=stream "
            "checkpoint.keep_best=true data.eval_path=city.csv", r"need (train\.eval_every)", "train.eval_every=3"),
        ("data.follow=true data.time.column=user_id data.time.window=9 data.path=stream data.idle_seconds=0",
            "more than (0)", "data.idle_seconds=1"),
        ("data.split=hash", "the name of a (column)", "data.split_column=user_id"),
        ("data.split_column=user_id", "needed (nothing)", LEFT_OUT),
        ("data.split=last data.split_column=user_id data.eval_fraction=0.5", r"needed 0\.1, (0) or 1",
            "data.eval_fraction=0"),
        ("data.bad_rows=2", "for instance (0.001)", "data.bad_rows=0.001"),
        ("data.table.label=clik", r"did you mean ('click')", "data.table.label=click"),
        ("data.table.features.usr_id.kind=sparse data.table.features.usr_id.num_rows=9 "
            "data.table.features.usr_id.mapping=hash", "did you mean ('user_id')",
            "data.table.features.usr_id.column=user_id"),
        ("data.table.features.user_id.kind=dense", "needed (.*)", "data.table.features.user_id.kind=sparse"),
        ("data.table.features.user_id.num_rows=0", "(at least 2)", "data.table.features.user_id.num_rows=2"),
        ("data.table.features.city.kind=sparse data.table.features.city.column=user_id "
            "data.table.features.city.num_rows=9 data.table.features.city.table=user_id", "(Give both the same)",
            "data.table.features.city.mapping=hash data.table.features.city.num_rows=99"),
        ("data.table.features.city.kind=sparse data.table.features.city.column=user_id "
            "data.table.features.city.num_rows=9 data.table.features.city.table=user_id "
            "data.table.features.city.mapping=hash",
            "give one of them (a table of its own)", "data.table.features.city.table=none"),
        ("data.table.task=regresion", '"(regression)"', "data.table.task=regression"),
        ("metrics.group=usr_id metrics.names=[auc,gauc]", "did you mean ('user_id')", "metrics.group=user_id"),
        ("metrics.slices=[usr_id]", "(metrics.slices): .* did you mean .user_id", "metrics.slices=none"),
        ("data.table.task=regression metrics.names=[auc]", "(Leave it out), or", "metrics.names=none"),
        ("data.table.task=regression metrics.names=[auc]", 'has it: task = ("binary")', "data.table.task=binary"),
        ("model.arch=din model.target=[user_id] model.history=[cty]", "which have (user_id)",
            "model.arch=dlrm model.target=none model.history=none"),
        ("model.arch=din model.target=[user_id] model.history=[user_id]", "needed each feature (once)",
            "model.arch=dlrm model.target=none model.history=none"),
        ("cache.host_dtypes.user=fp16", "needed some of (t_user_id)", LEFT_OUT),
        ("data.path=nowhere.csv", r"(no such file)", "data.path=city.csv"),
        ("data.path=city.cvs", r"[Dd]id you mean (city.csv|'city.csv')", "data.path=city.csv"),
        ("model.arch=din model.target=[user_id] model.history=[past] data.table.features.past.kind=sparse "
            "data.table.features.past.column=user_id data.table.features.past.mapping=hash "
            "data.table.features.past.num_rows=9", "Give both the (same number of rows)",
            "data.table.features.past.num_rows=99"),
        ("model.arch=din model.target=[user_id] model.history=[past] data.table.features.past.kind=sparse "
            "data.table.features.past.column=user_id data.table.features.past.mapping=hash "
            "data.table.features.past.num_rows=99 data.table.features.past.table=user_id", "(Leave them out)",
            "data.table.features.past.table=none"),
        ("data.table.features.past.kind=sparse data.table.features.past.column=user_id "
            "data.table.features.past.mapping=ids data.table.features.past.num_rows=192 "
            "data.table.features.past.table=user_id data.table.features.user_id.num_rows=192",
            "Give both .*(same)", "data.table.features.user_id.mapping=ids"),
        ("data.table.features.past.kind=sparse data.table.features.past.column=user_id "
            "data.table.features.past.mapping=ids data.table.features.past.num_rows=192 "
            "data.table.features.past.table=user_id data.table.features.user_id.num_rows=192 "
            "data.table.features.user_id.mapping=ids ids.past.ttl_steps=3 ids.user_id.ttl_steps=3",
            "(Remove one) of the two", LEFT_OUT),
        ("model.frozen=[usr_id]", "needed a table .*: (t_user_id)", "model.frozen=[t_user_id]"),
        ("model.frozen=[user_id,t_user_id]", "(Remove one)", "model.frozen=[user_id]"),
        ("model.build=mine:build", "(Name a file there) without .py", "model.build=none"),
        ("data.path=nothing.csv", "(remove it), or fetch", "data.path=city.csv"),
        ("data.table.encoding=utf-9", 'for instance "(latin-1)"', "data.table.encoding=latin-1"),
        ("data.time.column=user_id data.time.window=0", "(3600) is an hour", "data.time.window=3600"),
        ("data.table.features.user_id.mapping=ids data.table.features.user_id.num_rows=192 sharding.exchange=rows",
            "needed '(pooled)'", "sharding.exchange=pooled"),
        ("data.table.features.user_id.mapping=ids data.table.features.user_id.num_rows=192 cache.host_dtype=fp16",
            "(Leave it out)", "cache.host_dtype=fp32"),
    )),
]  # fmt: skip


_PAST = (
    "model.target=[user_id] model.history=[past] data.table.features.past.kind=sparse data.path=city.csv "
    "data.table.features.past.column=user_id data.table.features.past.mapping=hash data.table.features.past.num_rows=99"
)
OF_TRAININGS = [
    *(of_settings("tiny.toml", *row) for row in (
        ("tracking.trackers=[tensorboard,tensorboard]", "needed (each tracker once)",
            "tracking.trackers=[tensorboard]"),
        ("tracking.trackers=[prometheus] tracking.prometheus_port=70000", "needed 1 to (65535)",
            "tracking.prometheus_port=65535", DRY_RUN, "not installed|num_samples"),
        ("cache.host=file cache.host_dir=rows cache.host_bytes=10000000 sharding.mode=data_parallel",
            'needed "(sharded)"', "sharding.mode=sharded"),
        ("data.eval_fraction=0 metrics.names=[auc]", r"\((data\.eval_fraction) is 0\)", "data.eval_fraction=0.1"),
        ("data.synthetic.id_rows=192 train.device=cuda", 'needed "(cpu)"', "train.device=cpu"),
        ("model.arch=din model.target=[C1] model.history=[C2] train.precision=fp64", '"(bf16)"',
            "train.precision=bf16"),
        ("model.arch=din model.target=[C1] model.history=[C1] sharding.exchange=rows", 'needed "(pooled)"',
            "sharding.exchange=pooled model.history=[C2]"),
    )),
    *(of_settings("city.toml", *row) for row in (
        (f"{_PAST} model.arch=din sharding.mode=data_parallel", 'needed "(sharded)"', "sharding.mode=sharded"),
        (f"{_PAST} model.arch=hstu model.hstu.times=[user_id,past]", 'needed "none" or "(modulo)" and at least',
            "model.hstu.times=none"),
    )),
    Remedy(("train --dry-run",), "", "featureless.toml", "`embershard data inspect FILE -o (run.toml)` writes them",
        "run.toml", True, first="data inspect city.csv -o run.toml"),
]  # fmt: skip
FILES["featureless.toml"] = '[data]\nkind = "table"\npath = "city.csv"\n[data.table]\nlabel = "click"\n'
_DIVERGES = "train tiny.toml --set dense_optimizer.lr=1e30"
OF_STEPS = [
    Remedy((_DIVERGES,), "", "--run-dir one", "(Lower the learning rates)",
        "--run-dir two --set dense_optimizer.lr=0.1", True),
    Remedy((_DIVERGES,), "", "--run-dir one", r"clip \((dense_optimizer\.clip_norm)\)",
        "--run-dir two --set dense_optimizer.clip_norm=1e-30", True),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases([*OF_SETTINGS, *OF_CACHES, *OF_SAMPLES, *OF_TRAININGS]))
def test_what_is_advised_of_settings_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases(OF_STEPS))
def test_what_is_advised_of_steps_helps(
    row: Remedy,
    command: str,
    one_rank_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", lambda _: None)  # it holds until a process ends
    check(row, command, capsys)

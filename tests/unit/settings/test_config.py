"""Settings: what a file and `--set` may say, what they may not, and that a written file reads back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from embershard.errors import ConfigError
from embershard.settings.decoding import to_record, to_toml
from embershard.settings.files import describe, json_schema, load_config
from embershard.training.config import RunConfig


@dataclass(frozen=True)
class Inner:
    """A section."""

    word: Literal["one", "two"] = "one"
    """Which word."""
    sizes: tuple[int, ...] = (1, 2)
    """Some sizes,
    on two lines."""
    rows: int | tuple[int, ...] = 5
    """One or many."""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    """A config."""

    rate: float = 0.5
    """A rate."""
    path: str | None = None
    """A path."""
    pair: tuple[float, float] | None = None
    on: bool = True
    inner: Inner = field(default_factory=Inner)


@pytest.fixture
def load(tmp_path: Path):
    def _load(text: str = "", *overrides: str, cls: type = Outer):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return load_config(cls, path, overrides)

    return _load


def test_file_and_overrides(load):
    config = load('rate = 1\n[inner]\nword = "two"\nsizes = [3]', "inner.sizes=4,5", "on=false", "pair=[1, 2.5]")
    assert config == Outer(rate=1.0, on=False, pair=(1.0, 2.5), inner=Inner(word="two", sizes=(4, 5)))
    assert type(config.rate) is float


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rate=1e-3", "rate", 0.001),
        ("path=/data/day_0", "path", "/data/day_0"),
        ("path=2024", "path", "2024"),
        ('path="a b"', "path", "a b"),
        ("path=a=b", "path", "a=b"),
        ("path=none", "path", None),
        ("inner.word=two", "word", "two"),
        ("inner.rows=7", "rows", 7),
        ("inner.rows=7,8", "rows", (7, 8)),
        ("inner.names=day_*,train*", "names", ("day_*", "train*")),
        ("inner.sizes=[]", "sizes", ()),
        ("inner.sizes=none", "sizes", ()),
        ("inner.names=None", "names", ()),
        ('inner.names=["none"]', "names", ("none",)),
    ],
)
def test_override_is_read_by_the_type_of_the_setting(load, override, key, value):
    config = load('path = "x"', override)
    owner = config.inner if override.startswith("inner.") else config
    assert getattr(owner, key) == value


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("rat = 1", (), r"rat: unknown key\. Did you mean rate\?"),
        ("[inner]\nwrod = 1", (), r"inner\.wrod: unknown key\. Did you mean inner.word\?"),
        ("[iner]\n", (), r"iner: unknown key\. Did you mean inner\?"),
        ("zzz = 1", (), "Known here: rate, path"),
        ("", ("inner.wrod=one",), r"inner\.wrod: unknown key\. Did you mean inner.word\?"),
        ("", ("rate.x=1",), "rate is a setting, not a section"),
        ("", ("inner=1",), "inner is a section"),
        ("", ("rate",), "needed KEY=VALUE"),
        ('rate = "fast"', (), r"rate: got 'fast', needed number"),
        ("on = 1", (), r"on: got 1, needed true \| false"),
        ("rate = true", (), "rate: got True, needed number"),
        ("inner = 3", (), "inner: got 3, needed section"),
        ("[inner]\nword = 'six'", (), r'inner\.word: got \'six\', needed "one" \| "two"'),
        ("[inner]\nsizes = [1, 'x']", (), r"inner\.sizes\[1\]: got 'x', needed integer"),
        ("", ("inner.rows=many",), r"inner\.rows: got \['many'\], needed integer \| \[integer, \.\.\.\]"),
        ("", ("pair=1",), r"needed \[number, number\] \| none"),
        ("", ("rate=quick",), "rate: got 'quick', needed number"),
        ("rate =", (), "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(load, text, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load(text, *overrides)


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read .* existing file"):
        load_config(Outer, Path("nowhere.toml"))


@pytest.mark.parametrize("text", ["x = " + "[" * 3000 + "]" * 3000, f"[{'.'.join(['a'] * 3000)}]"])
def test_a_file_that_is_nested_too_deeply_is_refused(load, text):
    with pytest.raises(ConfigError, match=r"nested too deeply|cannot be read"):
        load(text, cls=RunConfig)


def test_written_config_reads_back(load):
    config = Outer(rate=1e-8, path='quo"te\\ \n ü', pair=(1.0, 2.0), inner=Inner(rows=(1, 2), names=("a", "b")))
    assert load(to_toml(config)) == config


def test_reference_takes_docs_and_types_from_the_dataclasses():
    settings = {setting.key: setting for setting in describe(Outer())}
    assert (settings["rate"].type, settings["rate"].default, settings["rate"].doc) == ("number", "0.5", "A rate.")
    assert settings["inner.sizes"].doc == "Some sizes, on two lines."
    assert settings["path"].type == "text | none"


def test_every_setting_of_a_run_is_documented():
    missing = [setting.key for setting in describe(RunConfig()) if not setting.doc]
    assert missing == []


def test_a_run_reads_back_with_every_section_changed(load):
    text = """
    [data]
    kind = "criteo"
    path = "x"
    [data.criteo]
    num_rows = 50
    [model]
    arch = "dlrm_dcn"
    dcn_num_layers = 2
    [cache]
    device_bytes = 1000
    policy = "lru"
    [look_ahead]
    prefetch = 3
    [profile]
    samples = 5
    [sharding]
    plan = "p.json"
    [tracking]
    project = "clicks"
    [embedding_optimizer]
    kind = "sgd"
    lr = 1
    [dense_optimizer]
    kind = "adamw"
    betas = [0.8, 0.9]
    [schedule]
    decay = "cosine"
    decay_steps = 5
    [train]
    max_steps = 3
    [metrics]
    names = ["recalibrated_ne"]
    recalibration = 0.1
    [checkpoint]
    at_end = false
    [publish]
    folder = "published"
    every_seconds = 60.0
    """
    config = load(text, cls=RunConfig)
    assert load(to_toml(config), cls=RunConfig) == config
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(RunConfig(), f.name)]
    others = {"ids"}  # which excludes a plan and a profile: tests/unit/training/fit/test_id_rules.py
    assert changed == [f.name for f in dataclasses.fields(config) if f.name not in others]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.eval_every=5", "data.eval_fraction=0"], "eval_every has no effect"),
        (["profile.samples=10", "cache.policy=lru", "cache.warmup=false"], "a profile has no effect"),
        (["profile.path=p.npz", "cache.policy=lru", "cache.warmup=false"], "a profile has no effect"),
        (["profile.samples=10", "profile.path=p.npz"], "both set"),
        (["profile.samples=0", "cache.policy=frequency"], "at least 1"),
        (["look_ahead.lookahead=-1"], "look_ahead.lookahead=-1, .*: needed 0 or more"),
        (["look_ahead.lookahead=1"], "look_ahead.prefetch=2 is more than look_ahead.lookahead=1"),
        (["train.batch_size=0"], "train.batch_size: got 0"),
        (["train.global_batch_size=0"], "train.global_batch_size: got 0"),
        (
            ["train.batch_size=8", "train.global_batch_size=16"],
            "both set.*Remove the other: --set train.global_batch_size=none, or --set train.batch_size=none",
        ),
        (["train.init=zeros"], "train.init"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last: got 0"),
        (["train.seed=12345678901234567890123"], "train.seed: got 1234.*, needed an integer of 64 bits, below 2"),
        (
            ["train.max_steps=-9223372036854775809"],
            "train.max_steps: got -9223372036854775809, needed an integer of 64",
        ),
        ([f"data.synthetic.num_samples={10**21}"], "data.synthetic.num_samples: got 1000.*, needed an integer of 64"),
        (
            [f"data.synthetic.num_samples={10**18}"],
            "num_samples = 1000000000000000000; needed at most 40,960,000,000, which are 10,000,000 chunks",
        ),
        (["dense_optimizer.betas=[2, 3]"], r"dense_optimizer.betas: got \[2.0, 3.0\], needed .* each .* below 1"),
        (
            ["embedding_optimizer.kind=adam", "embedding_optimizer.betas=[0.9, 1]"],
            r"embedding_optimizer.betas: got \[0.9, 1.0\], needed two numbers",
        ),
        ([f"model.over_arch_layer_sizes={'[' * 3000}"], "model.over_arch_layer_sizes.*needed"),
    ],
)
def test_a_run_refuses_what_cannot_be_meant(load, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load("", *overrides, cls=RunConfig)


@pytest.mark.parametrize("key", ["cache.lookahead", "cache.prefetch", "cache.profile_samples", "cache.background"])
def test_a_name_of_earlier_days_is_an_unknown_key(load, key):
    for text, overrides in ((f"[cache]\n{key.removeprefix('cache.')} = 8\n", ()), ("", (f"{key}=8",))):
        with pytest.raises(ConfigError, match=f"{re.escape(key)}: unknown key"):
            load(text, *overrides, cls=RunConfig)


@pytest.mark.parametrize("key", ["train.learning_rate", "cache.learning_rate"])
def test_a_key_of_another_section_or_program_is_found(load, key):
    section, name = key.split(".")
    for text, overrides in ((f"[{section}]\n{name} = 8\n", ()), ("", (f"{key}=8",))):
        with pytest.raises(ConfigError, match=rf"{key}: unknown key. Did you mean embedding_optimizer.lr or dense_opt"):
            load(text, *overrides, cls=RunConfig)


@pytest.mark.parametrize("policy", ["lookahead", "frequency", "lfu", "lru"])
def test_every_policy_has_a_use_for_a_counted_profile(load, policy):
    """`lru` for its warm-up, `lfu` as its first counts."""
    config = load("", "profile.samples=10", f"cache.policy={policy}", cls=RunConfig)
    assert config.counts_a_profile
    assert config.has_profile


@pytest.mark.slow
def test_the_schema_has_all_settings_with_their_meanings():
    schema = json_schema(RunConfig)

    def keys(section: dict, at: str = "") -> Iterator[str]:
        assert section["additionalProperties"] is False
        for name, found in section["properties"].items():
            inner = schema["$defs"].get(found.get("$ref", "").rpartition("/")[2])
            if inner is None:
                assert found["description"]
                yield f"{at}{name}"
            else:
                yield from keys(inner, f"{at}{name}.")

    assert list(keys(schema)) == [setting.key for setting in describe(RunConfig())]
    assert schema["$defs"]["TableFeature"]["properties"]["kind"]["enum"] == ["dense", "sparse"]
    assert ">>>" not in json.dumps([section["description"] for section in schema["$defs"].values()])


@pytest.mark.slow
def test_settings_of_a_run_that_are_cut_off_are_not_taken_from_the_defaults(tmp_path: Path):
    """Without its last lines, a run would save nothing, and train to another end."""
    (tmp_path / "metrics.jsonl").touch()
    file, text = tmp_path / "config.toml", to_record(RunConfig())
    for length in range(len(text) - 1):
        file.write_text(text[:length])
        with pytest.raises(ConfigError, match=r"config\.toml: .*\. Copy it again\."):
            load_config(RunConfig, file)
    file.write_text(text)
    assert load_config(RunConfig, file) == RunConfig()

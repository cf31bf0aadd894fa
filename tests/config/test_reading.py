"""Reading a configuration: files, overrides, defaults and errors.

An error is one line that names the key.
"""

import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from dynmo.config import Config, load, parse
from dynmo.errors import ConfigError
from dynmo.models.options import ModelOptions
from dynmo.options import parse_bytes, value_text
from dynmo.plan.options import Balance
from tests.config.refusal import refusal


@pytest.fixture
def write(tmp_path: Path):
    def to(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return to


# Accepted files.


def test_empty_file_gives_the_defaults(write):
    assert load(write("")) == load() == Config()
    assert load() == parse(Config().model_dump())  # defaults are not validated by themselves
    assert (load().microbatches, load().ranks, load().model.layer_count) == (8, 1, 18)


def test_set_overrides_the_file_and_the_defaults(write):
    path = write("[train]\nsteps = 7\nlr = 1\n")
    assert load(path).train.steps == 7
    config = load(path, ["train.steps=8", " train.steps = 9 ", "balance.balancer=none"])
    assert (config.train.steps, config.train.lr, config.balance.balancer) == (9, 1.0, "none")
    assert config.train.micro_batch == 4


@pytest.mark.parametrize(
    ("text", "section", "value"),
    [
        ("name=demo", None, "demo"),
        ("name=2024", None, "2024"),  # TOML would read numbers, a date and a boolean here
        ("name=1e5", None, "1e5"),
        ("name=2024-01-31", None, "2024-01-31"),
        ("name=true", None, "true"),
        ('name="demo"', None, "demo"),
        ("data.source=file:a = b", "data", "file:a = b"),
        ("pipeline.schedule=1f1b", "pipeline", "1f1b"),
        ("pipeline.memory_limit=40GiB", "pipeline", 40 * 2**30),
        ("pipeline.memory_limit=1024", "pipeline", 1024),
        ("dynamism.freezing.cache_bytes=2GiB", "dynamism.freezing", 2 * 2**30),
        ("dynamism.freezing.cache_bytes=0", "dynamism.freezing", 0),
        ("data.shuffle=batches", "data", "batches"),
        ("train.betas=[0.8, 0.9]", "train", (0.8, 0.9)),
        ("balance.initial=[18]", "balance", (18,)),
        ('dynamism.cases=["freezing"]', "dynamism", ("freezing",)),
        ("model.tied=true", "model", True),
        ("model.kind=python:mine.models:make", "model", "python:mine.models:make"),
        ("model.f=[1, 0.5]", "model", (1.0, 0.5)),
        ("model.b=1", "model", 1.0),
    ],
)
def test_an_override_is_toml_or_a_bare_string(text, section, value):
    emulated = (
        ["model.kind=emulated", "model.layers=2"] if text.startswith(("model.f", "model.b")) else []
    )
    config = load(None, [*emulated, text])
    key = text.partition("=")[0].split(".")[-1]
    assert getattr(attrgetter(section)(config) if section else config, key) == value


@given(
    st.integers(1, 2**31 - 1),
    st.floats(0, 1e300),
    st.booleans(),
    st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", fullmatch=True),
)
def test_override_round_trip(steps, lr, tied, name):
    given = f"train.steps={steps} train.lr={lr!r} model.tied={str(tied).lower()} name={name}"
    config = load(None, given.split())
    read = (config.train.steps, config.train.lr, config.model.tied, config.name)
    assert read == (steps, lr, tied, name)


def test_sections_are_frozen_and_hashable():
    config = Config(model=ModelOptions(blocks=2), balance=Balance(initial=(6,)))
    assert hash(config) == hash(Config(model=ModelOptions(blocks=2), balance=Balance(initial=(6,))))
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_microbatches_are_counted_per_step():
    assert load(None, ["train.global_batch=24", "train.micro_batch=3"]).microbatches == 8


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        (["model.blocks=3"], 8),
        (["model.kind=emulated", "model.layers=5"], 5),
        (["model.kind=python:a:b"], None),
    ],
)
def test_layer_count_follows_the_model_kind(overrides, layers):
    assert load(None, overrides).model.layer_count == layers


def test_freezing_schedule_selects_the_schedule_policy():
    assert load().dynamism.freezing.policy == "autofreeze"
    assert (
        load(None, ["dynamism.freezing.schedule=[[10, 4]]"]).dynamism.freezing.policy == "schedule"
    )
    both = ["dynamism.freezing.schedule=[[10, 4]]", "dynamism.freezing.policy=autofreeze"]
    assert load(None, both).dynamism.freezing.policy == "autofreeze"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1KiB", 1024), ("1.5 GB", 1_500_000_000), ("40GiB", 40 * 2**30),
     (" 2TB ", 2 * 10**12), ("0.5MiB", 2**19), ("7B", 7), ("1gib", 2**30)],
)  # fmt: skip
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1 XB", "1e3", "1GiB2", "1,5GiB", "1.5.3GB", "1GiB or so", "½GiB", "٣GiB"],
)
def test_parse_bytes_refuses_bad_sizes(text):
    with pytest.raises(ValueError, match="40GiB"):
        parse_bytes(text)


# Round trip.

_paths = st.text(min_size=1, max_size=20).filter(lambda text: text.strip() == text)


@given(
    _paths,
    st.floats(0, 1e308),
    st.floats(1e-300, 1e9),
    st.lists(st.floats(0, 1e9), min_size=8, max_size=8),
    st.none() | st.integers(1, 2**62),
)
def test_config_file_round_trip_is_exact(tmp_path_factory, source, lr, timeout, times, limit):
    config = parse(
        {
            "data": {"source": f"file:{source}"},
            "train": {"lr": lr},
            "parallel": {"timeout": timeout},
            "model": {"kind": "emulated", "f": times},
            "pipeline": {"memory_limit": limit},
            "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[0, 1], [5, 7]]}},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_bytes(config.to_toml().encode())
    assert load(path) == config


def test_any_character_round_trips(write):
    config = parse({"data": {"source": 'file:"\\\n\r\t\x00\x1b\x7f\x85\u2028é😀'}})
    assert load(write(config.to_toml())) == config


def test_written_config_names_every_key():
    written = tomllib.loads(Config().to_toml())
    dumped = Config().model_dump(mode="json", exclude_none=True)
    assert written == dumped


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "overrides",
    [
        ["elastic.reshape=true", "parallel.replicas=2147483647", "train.global_batch=2147483647"],
        ["train.global_batch=2147483646", "train.reduction_slots=5"],
    ],
)
def test_large_numbers_are_refused_quickly(overrides):
    """The check must not loop over all numbers."""
    with pytest.raises(ConfigError, match=r"elastic\.reshape = true|train\.reduction_slots = 5"):
        load(None, ["train.micro_batch=1", *overrides])


# Keys of another kind of model.

GPT_KEYS = {"blocks": 8, "hidden": 256, "heads": 4, "dropout": 0.0, "tied": False, "init_std": 0.02}
EMULATED_KEYS = {"layers": 8, "f": 0.01, "b": 0.01, "w": 0.01, "bytes": 65536, "speeds": []}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("python:a:b", GPT_KEYS | EMULATED_KEYS), ("gpt", EMULATED_KEYS), ("emulated", GPT_KEYS)],
)
def test_key_of_another_model_kind_is_refused(write, kind, keys):
    """The key is refused at its default value too, because the user expects an effect."""
    for key, value in keys.items():
        owner = "gpt" if key in GPT_KEYS else "emulated"
        says = f'model.{key} is a key of kind = "{owner}", which model.kind = "{kind}" has not'
        with pytest.raises(ConfigError, match=re.escape(says)):
            parse({"model": {"kind": kind, key: value}})
        path = write(f'model.kind = "{kind}"')
        with pytest.raises(ConfigError, match=re.escape(f"--set: {says}")):
            load(path, [f"model.{key}={value_text(value)}"])
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        parse({"model": {"kind": kind, **dict(list(keys.items())[:2])}})


@pytest.mark.parametrize(
    ("kind", "own"), [("python:a:b", {}), ("gpt", GPT_KEYS), ("emulated", EMULATED_KEYS)]
)
def test_saved_config_has_only_keys_of_its_model_kind(write, kind, own):
    config = parse({"model": {"kind": kind}})
    assert tomllib.loads(config.to_toml())["model"].keys() == {"kind", "vocab", "sequence", *own}
    assert load(write(config.to_toml())) == config
    # A run of an earlier version wrote every key, whatever it was.
    common = {"kind": kind, "vocab": 256, "sequence": 256}
    text = "[model]\n" + "\n".join(
        f"{k} = {value_text(v)}"
        for k, v in (common | GPT_KEYS | EMULATED_KEYS | {"hidden": 64, "layers": 9}).items()
    )
    then = load(write(text), ["train.steps=7"])
    assert (then.model.kind, then.train.steps) == (kind, 7)
    assert then.model.hidden == (64 if kind == "gpt" else 256)
    assert then.model.layers == (9 if kind == "emulated" else 8)
    for key in (GPT_KEYS | EMULATED_KEYS).keys() - own.keys():
        with pytest.raises(ConfigError, match=f"--set: model.{key} is a key of kind"):
            load(write(text), [f"model.{key}={value_text((GPT_KEYS | EMULATED_KEYS)[key])}"])


def test_former_key_is_left_out_with_a_warning(write, caplog, monkeypatch):
    path = write('[pipeline]\nschedule = "1f1b"\nw_granularity = "linear"\n')
    assert load(path) == parse({"pipeline": {"schedule": "1f1b"}})
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: pipeline.w_granularity is gone and has no effect; leave it out (each W runs "
        "where the schedule has it)"
    ]
    monkeypatch.setenv("RANK", "1")
    load(path)
    assert len(caplog.records) == 1, "rank 0 alone warns"
    with pytest.raises(ConfigError, match=r"--set: unknown key pipeline\.w_granularity"):
        load(path, ["pipeline.w_granularity=whole"])


def test_keys_that_the_new_kind_has_are_kept(write):
    path = write('[model]\nkind = "gpt"\nblocks = 3\nheads = 2\n')
    assert load(path, ["model.kind=moe"]).model.blocks == 3


def test_set_changes_the_model_kind_of_a_file(write):
    """Keys of the old kind in the file are dropped."""
    path = write('[model]\nkind = "emulated"\nlayers = 5\nf = 0.5\nsequence = 16')
    config = load(path, ["model.kind=gpt", "model.blocks=2"])
    assert config == parse({"model": {"kind": "gpt", "blocks": 2, "sequence": 16}})
    with pytest.raises(ConfigError, match=r"--set: model.f"):
        load(path, ["model.kind=gpt", "model.f=0.5"])


@pytest.mark.parametrize(("file", "given"), [("steps", "epochs"), ("epochs", "steps")])
def test_set_changes_how_the_length_is_given(write, file: str, given: str):
    train = load(write(f"[train]\n{file} = 9"), [f"train.{given}=3"]).train
    assert getattr(train, given) == 3
    with pytest.raises(ConfigError, match=r"train.epochs = 3 and train.steps = 3; give one"):
        load(write(f"[train]\n{file} = 9"), ["train.epochs=3", "train.steps=3"])


# Refused files: one line, with the place and what to do.


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = 5", ["unknown key steps", "did you mean train.steps?"]),
        ("[train]\nstesp = 5", ["unknown key train.stesp", "did you mean train.steps?"]),
        ("[trian]\nsteps = 5", ["unknown key trian", "did you mean train?"]),
        ("[checkpoint]\nzzz = 1", ["unknown key checkpoint.zzz", "every, keep"]),
        ("zzz = 1", ["unknown key zzz", "model, data, train"]),
        (
            "[dynamism.freezing]\nshedule = []",
            ["unknown key dynamism.freezing.shedule", "did you mean dynamism.freezing.schedule?"],
        ),
        ("[dynamism.experts]\nx = 1", ["unknown key dynamism.experts.x", "record_every"]),
        ("[dynamism.pruning]\nfinal = 1", ["unknown key dynamism.pruning.final"]),
        ("[train]\nstesp = 5\nlr = 'x'", ["unknown key train.stesp", "(and 1 more)"]),
        ('"a\\nb" = 1', ["unknown key a b"]),
        ("[train]\nsteps = 'ten'", ['train.steps = "ten"', "integer"]),
        ("[train]\nsteps = '10'", ['train.steps = "10"', "integer"]),
        ("[train]\nsteps = 1.0", ["train.steps = 1.0", "integer"]),
        ("[train]\nsteps = true", ["train.steps = true", "integer"]),
        ("[train]\nlr = nan", ["train.lr = nan", "finite"]),
        ("[train]\nlr = 1" + "0" * 400, ["train.lr = 1000", "..."]),
        ("[train]\nbetas = [0.9]", ["train.betas[1]", "missing"]),
        ("[train]\nbetas = [0.9, 'x']", ["train.betas[1]", "number"]),
        ("[train]\nbetas = [0.9, 0.9, 0.9]", ["train.betas", "too long"]),
        ("[train]\nbetas = 0.9", ["train.betas", "must be a list"]),
        ("seed = 1979-05-27", ["seed = 1979-05-27", "integer"]),
        ("train = 5", ["train = ", "must be a section"]),
        ("[[train]]", ["train = ", "must be a section"]),
        ("[train]\n\nsteps 5", ["not valid TOML", "line 3"]),
        ("[train]\nsteps = 1\nsteps = 2", ["not valid TOML", "overwrite"]),
        ("x = 1" + "0" * 5000, ["not valid TOML"]),
        ("x = " + "[" * 100_000, ["not valid TOML"]),
        ("seed = " + "[" * 400 + "]" * 400, ["it is nested too deep"]),
    ],
)
def test_bad_files_are_refused(write, text, parts):
    path = write(text)
    message = refusal(path=path)
    assert message.startswith(f"{path}: ")
    for part in parts:
        assert part in message


def test_unreadable_file_is_refused(tmp_path):
    assert "No such file" in refusal(path=tmp_path / "none.toml")
    assert "directory" in refusal(path=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    assert "not UTF-8" in refusal(path=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.steps", ["no '='", "section.key=value"]),
        ("lr=1", ["unknown key lr", "did you mean train.lr?"]),
        ("trian.steps=1", ["unknown key trian.steps", "did you mean train.steps?"]),
        ("train.steps.x=1", ["unknown key train.steps.x"]),
        ("=1", ["unknown key"]),
        ("train={steps = 1}", ["train is a section", "train.lr=..."]),
        ("train.betas=[0.9", ["not a TOML value", "--set train.betas=[0.9"]),
        ('name="demo', ["not a TOML value"]),
        ("train.steps=", ['train.steps = ""', "integer"]),
        # A value cannot smuggle in another key.
        ("train.steps=1\ntrain.lr=2", ["train.steps", "integer"]),
        ("dynamism.cases=freezing", ["dynamism.cases", "must be a list"]),
    ],
)
def test_bad_overrides_are_refused(text, parts):
    message = refusal(text)
    assert message.startswith("--set")
    for part in parts:
        assert part in message


def test_override_below_a_plain_key_is_refused(write):
    assert "train must be a section" in refusal("train.steps=1", path=write("train = 5"))


def test_error_names_the_file_or_the_override(write):
    path = write("[train]\nlr = 'x'")
    assert refusal("train.steps=3", path=path).startswith(f"{path}: train.lr")
    assert refusal("train.lr=y", path=path).startswith("--set: train.lr")
    assert refusal("train.micro_batch=3", path=write("")).startswith(
        f"{path} and --set: train.micro_batch"
    )


NO_NAMES = ["a/b", "..", ".", ".hidden", "../up", "/etc", "é", "a\x00b", "a\\b", "~"]


@pytest.mark.parametrize("text", [*NO_NAMES, "a b", "", "x" * 101, "demo\n", "\ndemo"])
def test_run_name_must_be_a_plain_folder_name(text):
    with pytest.raises(ConfigError, match=r"^config: name = .*letters, digits"):
        parse({"name": text})


def outcome(override: str) -> str:
    """The error message, or the override itself if nothing went wrong."""
    try:
        load(None, [override])
    except ConfigError as error:
        return str(error)
    return ascii(override)


@given(st.text(max_size=40))
def test_any_override_gives_a_config_or_a_one_line_error(text):
    assert outcome(text).isprintable()


@given(
    st.sampled_from(["name", "seed", "train.steps", "train.betas", "model.f", "dynamism.cases"]),
    st.text(max_size=20),
)
@example("pipeline.memory_limit", "1XB")
def test_any_bad_value_names_its_key_in_one_line(key, text):
    message = outcome(f"{key}={text}")
    assert message.isprintable()
    assert key in message

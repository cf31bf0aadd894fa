"""Options of other trainers: what the advice names exists, and errors give it."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import pytest

import dynmo
from docs.tools import reference
from dynmo.config import parse
from dynmo.counterparts import COUNTERPARTS, Counterpart
from dynmo.errors import ConfigError

_KEYS = {
    f"{name}.{key}".removeprefix("top.")
    for name, section in reference.sections()
    for key in section.model_fields
}


@pytest.mark.parametrize("row", COUNTERPARTS, ids=lambda row: row.names.split()[0])
def test_what_is_advised_exists(row: Counterpart) -> None:
    if row.file.startswith("dynmo "):
        command, _, option = row.file.removeprefix("dynmo ").partition(" --")
        options = reference.commands()[command.replace(" ", ".")].params
        assert any(f"--{option}" in each.opts for each in options)
    elif row.file:
        assert row.file.partition(" = ")[0] in _KEYS
    if row.python:
        name, argument = re.fullmatch(r"([\w.]+)\((\w+)=.*\)", row.python).groups()  # type: ignore[union-attr]
        made: Any = attrgetter(name)(dynmo)
        assert argument in inspect.signature(made).parameters


def test_each_name_has_one_row() -> None:
    names = [name for row in COUNTERPARTS for name in row.names.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": {"bf16": True}}, r'unknown key train.bf16; use train.precision = "bfloat16": '),
        ({"per_device_train_batch_size": 4}, "use train.micro_batch: samples of a microbatch"),
        ({"train": {"load_in_4bit": True}}, "train.load_in_4bit; weights are not quantized"),
        (
            {"parallel": {"tensor": 2}},
            r"parallel.tensor; no layer .* \(docs/does-not-do.md\); more",
        ),
        ({"parallel": {"context_parallel": 2}}, r"no layer and no sequence is cut \(docs/does-not"),
    ],
)
def test_an_unknown_key_gets_the_advice(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(keys)


def test_an_unknown_argument_gets_the_advice() -> None:
    unknown: Any = {"gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=r"^Pipeline has no gradient_acc.*Pipeline\(microbatch"):
        dynmo.Pipeline(None, None, **unknown)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Loader has no gradient_accumulation_steps; "):
        dynmo.Loader(None, [], **unknown)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^init has no ddp_timeout; use init\(timeout=\)"):
        dynmo.init(ddp_timeout=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^Sequential has no compute_loss_func; "):
        dynmo.Sequential([], compute_loss_func=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^save_pretrained has no merge_and_unload; "):
        dynmo.huggingface.save_pretrained(merge_and_unload=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^generate has no max_length; "):
        dynmo.huggingface.generate(max_length=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"learning_rate = 1: .*; use AdamW\(lr=\)"):
        dynmo.AdamW(learning_rate=1)  # type: ignore[call-arg]
    former: Any = {"w_granularity": "whole"}
    with pytest.raises(ConfigError, match=r"^Pipeline has no w_granularity; leave it out"):
        dynmo.Pipeline(None, None, **former)  # type: ignore[arg-type]
    for method in (dynmo.Pipeline.step, dynmo.Pipeline.advance, dynmo.Pipeline.evaluate):
        says = rf"^{method.__qualname__} has no keys; use samples="
        with pytest.raises(ConfigError, match=says):
            method(None, keys=[1])  # type: ignore[call-overload]
    for name in ("keys", "unheard"):
        with pytest.raises(
            ConfigError, match=rf"^Pipeline has no {name}; its arguments are model, "
        ):
            dynmo.Pipeline(None, None, **{name: 1})  # type: ignore[arg-type]

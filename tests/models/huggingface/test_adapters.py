"""Adapters of peft in models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.config import LoraRuntimeConfig
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.models.huggingface.adapters import Adapters, lora_config
from dynmo.models.huggingface.model import from_pretrained, make
from dynmo.models.huggingface.names import base_name, is_adapter
from dynmo.models.options import LoraOptions, ModelOptions
from tests.combinations import mostly_matrix
from tests.models.huggingface.adapter_jobs import STEPS, adamw, lora, model_of
from tests.models.huggingface.saved_models import folder_of
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config
from tests.pool import Pool

TRAIN = "tests.models.huggingface.adapter_jobs:train"
MOVING = {"schedule": "zb-h1", "move": [5, 3], "precision": "bfloat16"}


def test_adapters_have_the_bits_of_peft_in_one_process() -> None:
    model = model_of()
    layers = model.build(range(model.layers))
    state = {n: t for layer in layers for n, t in layer.named_parameters()}
    plain = AutoModelForCausalLM.from_config(config("llama"))
    plain.load_state_dict({base_name(n): t for n, t in state.items() if not is_adapter(n)})
    inject_adapter_in_model(lora(), plain)
    plain.load_state_dict(state)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer, losses = adamw(trained), list[float]()
    with dynmo.init(device="cpu") as world:
        for step in range(STEPS):
            batch, total = make_batch(step, padded=False), 0.0
            optimizer.zero_grad()
            for ids in batch["input_ids"].chunk(4):
                loss = plain(input_ids=ids, labels=ids, use_cache=False).loss / 4
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=4,
            optimizer=adamw,
            training=dynmo.Training(max_grad_norm=1e9),
        )
        found = [pipeline.step(make_batch(step, padded=False)).loss for step in range(STEPS)]
        weights = pipeline.state_dict()
    assert found == losses
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("options", mostly_matrix([MOVING, {"schedule": "zb-v"}], [MOVING]))
def test_any_ranks_have_the_bits_of_one(pool: Pool, options: dict[str, Any]) -> None:
    model = {"dropout": 0.1, "float32_adapters": "precision" in options}
    alone = {"model": model, "precision": options.get("precision", "float32")}
    assert pool.run(TRAIN, 2, **alone | options) == pool.run(TRAIN, 1, **alone) * 2


def test_layers_below_the_first_adapter_keep_nothing() -> None:
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(), world, microbatches=4)
        pipeline.step(make_batch(0, padded=False))
        costs = pipeline.measured.costs()
    # Embedding and the two halves of block 0.
    for cost in costs[:3]:
        assert (cost.gradient_bytes, cost.optimizer_bytes, cost.b, cost.w) == (0, 0, 0, 0)
    assert all(cost.b > 0 for cost in costs[4:])
    assert costs[-1].gradient_bytes == 0


def test_microbatches_that_come_again_skip_the_frozen_layers() -> None:
    found = list[tuple[float, str]]()
    for cache_bytes in (0, 1 << 24):
        case = dynmo.Freezing(schedule=((0, 3),), cache_bytes=cache_bytes)
        with dynmo.init(device="cpu") as world:
            pipeline = dynmo.Pipeline(model_of(), world, microbatches=4, cases=[case])
            samples = range(4) if cache_bytes else None
            batch = make_batch(0, padded=False)
            losses = [pipeline.step(batch, samples=samples).loss for _ in range(3)]
            found.append((losses[-1], pipeline.digest()))
            assert pipeline.measured.account().spared_forwards == (24 if cache_bytes else 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_adapters_stay_in_float32_if_asked(is_kept: bool) -> None:
    model = model_of(float32_adapters=True) if is_kept else model_of()
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model, world, microbatches=4, precision="bfloat16")
        pipeline.step(make_batch(0, padded=False))
        for module in pipeline.mesh.modules.values():
            for name, parameter in module.named_parameters():
                low = not (is_kept and is_adapter(name))
                assert parameter.dtype == (torch.bfloat16 if low else torch.float32), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_modules": ["q_prj", "v_proj"]},
            "lora.target_modules: no linear is named q_prj; its linears are down_proj, gate_proj",
        ),
        ({"target_modules": ["b", "a"]}, "no linear is named a or b; its linears are down_proj"),
        ({"target_modules": "nothing"}, "lora.target_modules: .*'?nothing.* linears are down_proj"),
        ({"layers_to_transform": [9]}, r"^lora.layers_to_transform: no .* \[9\]; blocks"),
        ({"init_lora_weights": "lora_ga"}, "lora.init_lora_weights = 'lora_ga'"),
    ],
)
def test_configs_that_fit_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"target_modules": ["q_proj"], **options}
    with pytest.raises(ConfigError, match=message) as caught:
        from_pretrained(config("llama"), lora=LoraConfig(**given))
    assert "\n" not in str(caught.value)


def test_misspelt_target_of_a_file_is_named_with_its_key() -> None:
    options = ModelOptions(
        kind="hf", path=str(folder_of("llama")), lora=LoraOptions(targets=("q_prj", "v_proj"))
    )
    with pytest.raises(ConfigError, match=r"^model\.lora\.targets: no linear is named q_prj; its"):
        make(options, 0)
    far = LoraOptions(targets=("q_proj",), layers=(9,))
    with pytest.raises(
        ConfigError, match=r"^model\.lora\.layers: no target is in the blocks \[9\]"
    ):
        make(options.model_copy(update={"lora": far}), 0)


def test_layers_need_targets_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model.lora.layers needs model.lora.targets by name"):
        lora_config(LoraOptions(layers=(1,)))


def test_adapter_that_nothing_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_pretrained(config("llama"), lora=lora(use_dora=True))
    monkeypatch.setattr(Adapters, "_start", lambda *_: None)
    with pytest.raises(ConfigError, match=r"lora_magnitude_vector\.default\.weight"):
        model.build(range(model.layers))


def test_values_come_on_the_cpu_without_a_gpu() -> None:
    offload = LoraRuntimeConfig(ephemeral_gpu_offload=True)
    layers = [
        from_pretrained(config("llama"), lora=lora(use_dora=True, **options)).build((3,))[3]
        for options in ({}, {"runtime_config": offload})
    ]
    one, other = (layer.state_dict() for layer in layers)
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())

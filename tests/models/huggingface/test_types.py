"""Every tensor has the type that transformers gives it, and the model computes with it as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dynmo
from docs.tools.families import PAGE
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.models.huggingface.layers import HuggingFaceLayer
from dynmo.pipeline.options import Precision, grouped
from dynmo.pipeline.shape_costs import shape_costs
from tests.combinations import mostly_matrix
from tests.huggingface.test_export import weights
from tests.models.huggingface.families import kinds
from tests.models.huggingface.folders import classes, config_of, kept
from tests.models.huggingface.saved_models import folder_of
from tests.models.huggingface.small import ROWS, TOKENS, make_batch
from tests.models.huggingface.tiny import VOCABULARY
from tests.pool import Pool

TRAIN = "tests.models.huggingface.small:train"
EVERYDAY = [("Ernie4_5_MoeForCausalLM", "bfloat16"), ("XGLMForCausalLM", "float16")]
# The page of families has the reason for the others. transformers does not read these two back.
TRAINED = [
    name
    for name, kind in sorted(kinds().items())
    if kind not in ("emu3", "mllama") and f"| `{name}` | `{kind}` |  |" not in PAGE.read_text()
]
# transformers cannot build them from a config of small sizes, or needs a package for it.
NOT_BUILT = {
    "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM",
}
BYTES = ("weight", "gradient", "optimizer", "rollback", "activation", "stash", "output")
IDS = torch.randint(3, VOCABULARY - 6, (4, 7), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers' own code


def types_of(pipeline: dynmo.Pipeline) -> dict[str, torch.dtype]:
    """Returns the type of each parameter and buffer, those of no layer too."""
    found = dict[str, torch.dtype]()
    for layer in pipeline.mesh.modules.values():
        assert isinstance(layer, HuggingFaceLayer)
        for path, module in ((("", layer)), *layer.shared_model.weightless.items()):
            named = (*module.named_parameters(path), *module.named_buffers(path))
            found |= {name: tensor.dtype for name, tensor in named}
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    mostly_matrix(((n, p) for n in TRAINED for p in ("bfloat16", "float16")), EVERYDAY),
)
def test_types_and_logits_are_those_of_transformers(
    name: str, precision: Precision, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, precision))
    named = (
        *plain.named_parameters(remove_duplicate=False),
        *plain.named_buffers(remove_duplicate=False),
    )
    wanted = {each: tensor.dtype for each, tensor in named}
    with torch.no_grad():
        logits = torch.cat([plain(input_ids=ids, use_cache=False).logits for ids in IDS.chunk(2)])
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model, world, microbatches=2, precision=precision)
        found = pipeline.evaluate({"input_ids": IDS}, outputs=True).outputs
        types = types_of(pipeline)
        assert types == {each: wanted[each] for each in types}
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, logits)
        losses = [pipeline.step({"input_ids": IDS, "labels": IDS}).loss for _ in range(2)]
    assert all(loss > 0 for loss in losses)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted({*kinds()} - {*classes()} - NOT_BUILT))
def test_no_other_class_keeps_float32(name: str) -> None:
    """The page of folders has every class that keeps some parameters or saved buffers."""
    found = [*kept(name, torch.bfloat16), *kept(name, torch.float16)]
    assert not found


RUNS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"precision": "bfloat16", "schedule": "zb-v", "move": [1, 3, 3, 1]},
    "flint": {"precision": "float16", "loss_scale": "dynamic", "move": [5, 3]},
    "gpt_oss": {"precision": "float16", "loss_scale": "dynamic", "move": [5, 3]},
    "inkling_text": {"precision": "bfloat16", "move": [2, 3], "recompute": "all"},
}


@pytest.mark.parametrize("kind", mostly_matrix(RUNS, ["ernie4_5_moe"]))
def test_ranks_and_moves_have_the_bits_of_one(pool: Pool, kind: str) -> None:
    several = {"schedule": "zb-h1", "post_validation": True, **RUNS[kind]}
    alone = {key: several[key] for key in ("precision", "loss_scale") if key in several}
    found = pool.run(TRAIN, 2, kind=kind, **several)
    assert found == pool.run(TRAIN, 1, kind=kind, **alone) * 2


def test_checkpoints_exports_and_costs_know_the_types(tmp_path: Path) -> None:
    """A layer has parameters of two types. The bytes that are predicted are those of a run."""
    folder = folder_of("ernie4_5_moe", dtype=torch.float32, vocab_size=VOCABULARY)
    model, batch = from_pretrained(folder, sequence=TOKENS), make_batch(0, padded=False)
    options: dict[str, Any] = {
        "microbatches": 4,
        "micro_batch": ROWS // 4,
        "precision": "bfloat16",
        "schedule": "1f1b",
        "optimizer": dynmo.SGD(lr=0.1, momentum=0.9),
    }
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model, world, **grouped(options))
        for _ in range(2):
            pipeline.step(batch)
        costs = (shape_costs(pipeline.options, model), pipeline.measured.costs())
        for key in (f"{of}_bytes" for of in BYTES):
            assert [getattr(c, key) for c in costs[0]] == [getattr(c, key) for c in costs[1]], key
        pipeline.save(tmp_path)
        types, digest = types_of(pipeline), pipeline.digest()
        again = dynmo.Pipeline(model, world, resume=tmp_path, **grouped(options))
        assert types_of(again) == types
        assert again.digest() == digest
        assert again.step(batch).loss == pipeline.step(batch).loss
        save_pretrained(pipeline, tmp_path / "float32")
        save_pretrained(pipeline, tmp_path / "bfloat16", dtype="bfloat16")
    exact = weights(tmp_path / "float32")
    assert {each.dtype for each in exact.values()} == {torch.float32}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    ours, theirs = weights(tmp_path / "bfloat16"), weights(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])

"""Early exit of models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.huggingface import from_pretrained, generate, save_pretrained
from dynmo.models.loss import causal_lm_loss
from dynmo.runtime.comm.meeting import Meeting
from tests.combinations import mostly_matrix
from tests.models.huggingface.case_jobs import SHAPES, TRAIN, equal_on_ranks
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config as tiny
from tests.pool import Pool

POLICIES: dict[str, dict[str, Any]] = {
    "softmax": {"threshold": 0.001},
    "state": {"confidence": "state", "threshold": 0.5},
    "classifier": {"confidence": "classifier", "threshold": 0.4},
    "adp-c": {"policy": "adp-c", "threshold": 0.0118},
}
COMBINATIONS = [(policy, shape) for shape in SHAPES for policy in POLICIES]


@pytest.mark.parametrize(("policy", "shape"), mostly_matrix(COMBINATIONS, [("softmax", "llama")]))
def test_ranks_moves_and_a_resume_keep_the_bits(
    pool: Pool, tmp_path: Path, policy: str, shape: str
) -> None:
    """Until tokens exit, the exits only learn."""
    options = {"exits": [0, 1], "start": 3, **POLICIES[policy]}
    given: dict[str, Any] = {"case": "EarlyExit", "shape": shape}
    told = equal_on_ranks(pool, tmp_path, options=options, **given)
    late = pool.run(TRAIN, 1, options=options | {"start": 5}, **given)[0]["losses"]
    assert told["losses"][:3] == late[:3]
    assert told["losses"][4:] != late[4:]


def expected(pipeline: dynmo.Pipeline, batch: dict[str, Tensor], exits: list[int]) -> float:
    """The loss of the exits and the head, with the model of transformers."""
    plain: Any = AutoModelForCausalLM.from_config(tiny("llama")).train()
    state = {n: x for n, x in pipeline.state_dict().items() if not n.startswith("exit_heads")}
    plain.load_state_dict(state)
    labels, losses = batch.pop("labels"), list[float]()
    with torch.no_grad():
        states: Any = plain(**batch, output_hidden_states=True, use_cache=False).hidden_states
        for at in (*exits, -1):
            # The last one has passed the norm.
            x = states[-1] if at < 0 else plain.model.norm(states[at + 1])
            losses.append(float(causal_lm_loss(plain.lm_head(x), labels)))
    weights = [at + 1 for at in exits] + [len(states) - 1]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def train_and_look(world: Meeting, folder: str) -> dict[str, Any]:
    """A loss, the export of the model, and what it generates with exits and without."""
    exits = [0, 1]
    cases = [dynmo.EarlyExit(exits=exits, start=1, threshold=0.001)]
    model = from_pretrained(tiny("llama"), cases=cases)
    pipeline = dynmo.Pipeline(model, world, microbatches=1, cases=cases, steps=3)
    wanted = expected(pipeline, make_batch(0, padded=False), exits)
    told: dict[str, Any] = {"loss": [pipeline.step(make_batch(0, padded=False)).loss, wanted]}
    save_pretrained(pipeline, folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    told["keys"] = sorted({*plain[1]["missing_keys"], *plain[1]["unexpected_keys"]})
    batch = make_batch(1, padded=True)
    with torch.no_grad():
        of_plain = plain[0].eval()(**batch, use_cache=False).logits
    both = [pipeline.evaluate(dict(batch), outputs=True, dense=dense) for dense in (True, False)]
    outputs: list[Any] = [each.outputs for each in both]
    told["equal"] = [torch.equal(each, of_plain) for each in outputs]
    dense, _ = (each.loss for each in both)
    told["dense"] = [dense, float(causal_lm_loss(of_plain, batch["labels"]))]
    pipeline.step(make_batch(1, padded=False))
    ids = make_batch(2, padded=False)["input_ids"]
    told["generated"] = list(generate(pipeline, ids, max_new_tokens=3).shape)
    told["exited"] = (
        pipeline.evaluate(dict(batch)).loss != pipeline.evaluate(batch, dense=True).loss
    )
    return told


def test_exits_share_the_head_and_an_export_has_it_once(pool: Pool, tmp_path: Path) -> None:
    job = "tests.cases.early_exit.test_hugging_face:train_and_look"
    (told,) = pool.run(job, 1, folder=str(tmp_path / "model"))
    assert told["loss"][0] == pytest.approx(told["loss"][1], rel=1e-6)
    assert told["dense"][0] == pytest.approx(told["dense"][1], rel=1e-6)
    assert (told["keys"], told["equal"]) == ([], [True, True])
    assert told["generated"] == [12, 12]
    assert told["exited"]

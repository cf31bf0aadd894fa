"""`generate`: a pipeline continues ids and texts as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

import dynmo
from dynmo.errors import ConfigError, InputError
from dynmo.huggingface import generate
from dynmo.runtime.comm.meeting import Meeting
from tests.combinations import mostly_matrix
from tests.huggingface.jobs import continued
from tests.huggingface.saved import save_model, save_tokenizer
from tests.models.huggingface.tiny import VOCABULARY, model_of
from tests.pool import Pool

JOBS = "tests.huggingface.jobs:"
PAD, NEW = 0, 6
IDS = torch.ones(2, dtype=torch.int64)
RUNS: list[tuple[int, str, bool, dict[str, Any]]] = [
    (2, "llama", False, {"schedule": "zb-v"}),
    (2, "mixtral", True, {"schedule": "1f1b", "replicas": 2}),
    (1, "gpt2", True, {"schedule": "1f1b"}),
    (4, "mixtral", True, {"schedule": "1f1b", "replicas": 2}),
    (2, "gemma", True, {"schedule": "1f1b"}),
    (1, "bloom", True, {"schedule": "1f1b"}),
]


def prompt(padded: bool = False) -> Tensor:
    """Ids of 3 rows, maybe with padding before two of them."""
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    if padded:
        ids[0, :2] = PAD
        ids[2, :4] = PAD
    return ids


def wanted(model: Any, ids: Tensor) -> Tensor:
    return model.generate(ids, do_sample=False, use_cache=False, max_new_tokens=NEW)


@pytest.mark.parametrize(("ranks", "kind", "padded", "options"), mostly_matrix(RUNS, RUNS[:3]))
def test_ids_are_those_of_transformers(
    pool: Pool, tmp_path: Path, ranks: int, kind: str, padded: bool, options: dict[str, Any]
) -> None:
    plain, ids = save_model(tmp_path, kind), prompt(padded)
    longer = wanted(plain, ids).tolist()
    arguments = {"folder": str(tmp_path), "ids": ids.tolist(), "new": NEW, **options}
    assert pool.run(f"{JOBS}continued", ranks, **arguments) == [longer] * ranks


def test_rows_end_by_themselves(world: Meeting, tmp_path: Path) -> None:
    """The ids of the end are those of the generation config. Shorter rows get padding."""
    plain, ids = save_model(tmp_path), prompt()
    free = wanted(plain, ids)
    ends = [int(free[0, 8]), int(free[1, 10]), int(free[2, 7])]
    generation: Any = plain.generation_config
    generation.eos_token_id = ends
    generation.save_pretrained(tmp_path)
    longer = wanted(plain, ids)
    assert longer.shape[1] < free.shape[1]
    assert bool((longer == PAD).any())
    assert continued(world, str(tmp_path), ids.tolist(), NEW) == longer.tolist()


def test_a_text_is_continued_with_the_tokenizer_of_the_folder(pool: Pool, tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    texts = pool.run(f"{JOBS}text_continued", 2, folder=str(tmp_path), text="1234")
    assert texts[0] == texts[1]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert texts[0].startswith(tokenizer.decode(tokenizer("1234")["input_ids"]))
    assert len(texts[0]) > len("1 2 3 4")


def test_ids_of_one_row_stay_one_row(world: Meeting) -> None:
    """The loss of routers is left out."""
    model = model_of("mixtral", output_router_logits=True)
    pipeline = dynmo.Pipeline(model, world, microbatches=2)
    longer = generate(pipeline, torch.tensor([5, 6, 7], dtype=torch.int32), max_new_tokens=2)
    assert (longer.shape, longer.dtype) == ((5,), torch.int64)
    assert longer[:3].tolist() == [5, 6, 7]


@pytest.mark.parametrize("end", [PAD, 2])
@pytest.mark.parametrize("given", [False, True])
def test_rows_with_padding_before_them_go_on_as_alone(
    world: Meeting, tmp_path: Path, end: int, given: bool
) -> None:
    """Also if the id of padding is the one of the end."""
    plain = save_model(tmp_path)
    generation: Any = plain.generation_config
    generation.pad_token_id, generation.eos_token_id = PAD, end
    generation.save_pretrained(tmp_path)
    pipeline = dynmo.Pipeline(dynmo.huggingface.from_pretrained(tmp_path), world, microbatches=1)
    ids = prompt(padded=True)
    mask = (ids != PAD).long() if given else None
    longer = generate(pipeline, ids, max_new_tokens=NEW, attention_mask=mask)
    for row, found in zip(ids, longer, strict=True):
        alone = generate(pipeline, row[row != PAD], max_new_tokens=NEW)
        new = alone[int((row != PAD).sum()) :]
        assert found[6 : 6 + len(new)].tolist() == new.tolist()
    with pytest.raises(InputError, match="a row ends with padding"):
        generate(pipeline, ids, attention_mask=torch.zeros_like(ids))
    with pytest.raises(InputError, match="needs the shape of the ids"):
        generate(pipeline, ids, attention_mask=torch.ones(1, 6))


def test_what_cannot_be_continued_is_refused(world: Meeting) -> None:
    pipeline = dynmo.Pipeline(model_of(), world, microbatches=2)
    with pytest.raises(ConfigError, match=r"no tokenizer .* made of a config\); give token ids"):
        generate(pipeline, "text")
    wrong: list[Any] = [torch.ones(3), IDS[None, None], [1, 2], IDS[:, None][:, :0]]
    for ids in wrong:
        message = "takes a text, or token ids" if ids is not wrong[3] else "one token at least"
        with pytest.raises(InputError, match=message):
            generate(pipeline, ids)
    with pytest.raises(InputError, match="max_new_tokens = 0; give 1 or more"):
        generate(pipeline, IDS, max_new_tokens=0)
    own = dynmo.Sequential([nn.Linear(4, 4)], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="generate: the pipeline's model is not one of"):
        generate(dynmo.Pipeline(own, world, microbatches=2), IDS)

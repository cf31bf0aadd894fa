"""dynmo's layers of each family have the bits of transformers, or the family is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from docs.tools.families import PAGE, row
from dynmo.models.huggingface.model import from_pretrained
from dynmo.models.model import named_tensors
from tests.combinations import mostly_matrix
from tests.models.huggingface.families import family, kinds, whole_model
from tests.models.huggingface.tiny import config

EVERYDAY = ("GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM")


@pytest.mark.parametrize("name", mostly_matrix(sorted(kinds()), EVERYDAY))
@pytest.mark.filterwarnings("ignore")  # those of transformers' own code
def test_page_tells_what_a_family_gives(name: str) -> None:
    told = family(name)
    assert told.outcome != "other numbers", told.differences
    start = row(told).rpartition(" | ")[0]
    written = PAGE.read_text().splitlines()
    assert any(line.startswith(start) for line in written), "python -m docs.tools.families"


def test_page_has_each_family_once() -> None:
    names = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert names == sorted(kinds())


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(kinds()))
@pytest.mark.filterwarnings("ignore")  # those of transformers' own code
def test_folder_of_a_family_has_the_values_of_transformers(name: str, tmp_path: Path) -> None:
    kind = kinds()[name]
    if f"| `{name}` | `{kind}` |  |" in PAGE.read_text():
        pytest.skip("it is refused")
    if kind in ("emu3", "mllama"):
        pytest.skip("transformers writes the config of a part, which it does not read")
    whole_model(config(kind)).save_pretrained(tmp_path)
    wanted: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = from_pretrained(tmp_path)
    tensors = dict(wanted.named_parameters(remove_duplicate=False)) | dict(wanted.named_buffers())
    users = {user for _, (_, user) in model.tied}
    for layer in model.build(range(model.layers)):
        for _, name, tensor in named_tensors(layer):
            assert name in users or torch.equal(tensor, tensors[name]), name

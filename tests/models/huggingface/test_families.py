"""dynmo's layers of each family have the bits of transformers, or the family is refused.

docs/reference/hugging-face-families.md says which.
"""

from __future__ import annotations

import pytest

from docs.tools.families import PAGE, row
from tests.models.huggingface.families import family, kinds

# One of each: tied weights, positions with weights, experts, two kinds of masks, blocks that a
# probe refuses to cut.
TELLING = (
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "PhiForCausalLM",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TELLING else pytest.mark.matrix)
        for name in sorted(kinds())
    ],
)
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

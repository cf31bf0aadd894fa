"""Writes docs/reference/lora-options.md. It takes a minute.

python -m docs.tools.lora_options
"""

from __future__ import annotations

import torch

from docs.tools.reference import FOLDER, table
from tests.models.huggingface.lora_trials import TRIALS, Told, Trial, told

PAGE = FOLDER / "lora-options.md"
_MARK, _END = "<!-- options of peft -->", "<!-- end of options -->"
_HEAD = ("option", "value", "dynmo", "two steps", "loaded", "reason")
_CLOSE = 1e-6


def row(trial: Trial, found: Told) -> str:
    """The line of the page about an option with a value."""
    steps = "" if trial.values.get("lora_dropout") else _word(found.steps)
    cells = ("refused", "", "") if found.reason else ("as peft", steps, _word(found.loaded))
    reason = found.reason.removeprefix(f"lora.{trial.option}: ")
    return table(_HEAD, [(f"`{trial.option}`", f"`{trial.value}`", *cells, reason)]).splitlines()[
        -1
    ]


def _word(far: float) -> str:
    return "bits" if not far else "close" if far <= _CLOSE else f"{far:.0e}"


def write() -> None:
    before, _, rest = PAGE.read_text().partition(_MARK)
    _, _, after = rest.partition(_END)
    lines = [*table(_HEAD, []).splitlines(), *(row(each, told(each)) for each in TRIALS)]
    text = "\n".join(lines)
    PAGE.write_text(f"{before}{_MARK}\n\n{text}\n\n{_END}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()

"""What options of a dynamic case have in common, and what they may know of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dynmo.models.options import ModelOptions
from dynmo.options import Options


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it starts. None: not known.

    Attributes:
        micro_batch: Samples in a microbatch.
        expert: Replicas that share one set of experts.
        on_cuda: Whether the ranks may compute on CUDA.
        compiles: Whether torch.compile runs parts of the layers.
    """

    layers: int | None = None
    steps: int | None = None
    seed: int = 0
    model: ModelOptions | None = None
    micro_batch: int | None = None
    expert: int = 1
    on_cuda: bool = False
    compiles: bool = False
    cases: Mapping[str, CaseOptions] = field(default_factory=dict[str, "CaseOptions"])

    @property
    def tokens(self) -> int | None:
        """Tokens of a microbatch, if known."""
        if self.model is None or self.micro_batch is None:
            return None
        return self.micro_batch * self.model.sequence


class CaseOptions(Options):
    """Options of one dynamic case.

    The module `case` beside them has a function `make(options, run)`.

    Attributes:
        name: Name of the case, in the file and in messages.
        turn: Cases act in the order of their turns. Cases of the user's own act last.
    """

    name: ClassVar[str]
    turn: ClassVar[int] = 0

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yields why the options do not fit a run, a line each."""
        return iter(())


def needs_own_layers(run: RunFacts, case: str, part: str) -> Iterator[str]:
    if run.model is not None and run.model.kind == "emulated":
        yield (
            f'dynamism.{case}: model.kind = "emulated" has no {part}; use "gpt" or a model of your '
            "own"
        )
    elif run.model is not None and run.model.kind == "hf":
        yield (
            f'dynamism.cases: "{case}" changes code that model.kind = "hf" takes from '
            'transformers; leave it out, or use "gpt" or a model of your own'
        )

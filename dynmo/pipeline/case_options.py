"""What options of a dynamic case have in common, and what they may know of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
        comes_again: Whether some microbatch comes again, in another epoch or evaluation.
    """

    layers: int | None = None
    steps: int | None = None
    seed: int = 0
    model: ModelOptions | None = None
    micro_batch: int | None = None
    expert: int = 1
    on_cuda: bool = False
    compiles: bool = False
    comes_again: bool | None = None
    cases: Mapping[str, CaseOptions] = field(default_factory=dict[str, "CaseOptions"])

    def problems(self) -> Iterator[str]:
        """Yields why options of the cases do not fit the run, a line each."""
        for options in self.cases.values():
            yield from options.problems(self)

    def most_groups(self, groups: int) -> int:
        """Returns how many of the groups of a layer's weights a replica may hold."""
        spare = max((options.spare_groups for options in self.cases.values()), default=0)
        return min(groups, groups // self.expert + spare)

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
        changes: The part of a GPT that the case gives other code, such as "attention". No other
            case may change it. Empty: none.
        chooses_tokens: Whether layers compute other tokens in each microbatch.
    """

    name: ClassVar[str]
    turn: ClassVar[int] = 0

    changes: ClassVar[str] = ""
    chooses_tokens: ClassVar[bool] = False

    @property
    def spare_groups(self) -> int:
        """Groups of a layer's weights that a replica may hold besides its equal part."""
        return 0

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yields why the options do not fit a run, a line each."""
        if self.changes and run.model is not None and run.model.kind == "emulated":
            yield (
                f'dynamism.{self.name}: model.kind = "emulated" has no {self.changes}; use "gpt" '
                "or a model of your own"
            )
        for other in run.cases.values():
            if self.changes and other.name != self.name and other.changes == self.changes:
                yield (
                    f'dynamism.cases: "{self.name}" and "{other.name}" both say what '
                    f"{self.changes} computes; leave one of them out"
                )
        if self.chooses_tokens and run.compiles:
            yield (
                f'train.compile = true with "{self.name}": shapes vary, and each would be compiled '
                "anew; use compile = false"
            )

    @classmethod
    def model_problems(cls, run: RunFacts) -> Iterator[str]:
        """Yields why a model of the case's layers does not fit a run that may not name the case."""
        return iter(())

    def gpt_layers(self, layers: Any) -> Any:
        """Returns the layers that a GPT has with this case.

        Args:
            layers: The `GptLayers` of a GPT, which cases of earlier turns may have changed.
        """
        return layers

    def hugging_face_layers(self, kinds: Any) -> Any:
        """Returns what makes the layers of a model of transformers with this case.

        Args:
            kinds: The `LayerKinds` of the model, which cases of earlier turns may have changed.
        """
        return kinds

    def layers_added(self, model: ModelOptions) -> int:
        """Returns how many layers `gpt_layers` adds."""
        return 0

    def measured(self, before: Any) -> Mapping[str, Any]:
        """Returns options that a run measured by itself (`Change.options`). A resume keeps them.

        Args:
            before: The run's options before the resume.
        """
        return {}

    @classmethod
    def compile_ahead(cls) -> None:
        """Compiles the loops of the case's kernels as a part of the set-up."""

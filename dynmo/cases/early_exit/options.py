"""Options of EarlyExit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dynmo import ModelOptions
from dynmo.extend import CaseOptions, Count, Listed, RunFacts, Whole


class EarlyExit(CaseOptions):
    """Tokens that a model is sure of leave it at exit heads."""

    name: ClassVar[str] = "early_exit"
    turn: ClassVar[int] = 3
    changes: ClassVar[str] = "attention"
    chooses_tokens: ClassVar[bool] = True

    policy: Literal["calm", "adp-c"] = "calm"
    """How exits decide and learn. `calm` weighs the losses by depth, and its threshold falls over
    the sequence. `adp-c` weighs them equally, and compares the largest probability."""
    confidence: Literal["softmax", "state", "classifier"] = "softmax"
    """The value that `calm` compares with the threshold: the largest probability minus the second,
    the cosine of the states before and after the last block, or a classifier of each exit."""
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """A token exits when its confidence is over this. Not set: 0.9 for `calm`, 0.998 for
    `adp-c`."""
    exits: Listed[Whole] | None = None
    """Blocks after which an exit head stands. Not set: at a third and two thirds of the depth."""
    start: Whole | None = None
    """Step from which tokens exit. Before it, exits only learn. Not set: after 30 % of the run."""
    record_every: Count = 10
    """Steps between two records of how many tokens exit at each depth."""

    @property
    def threshold_of_policy(self) -> float:
        """The threshold, or the policy's own."""
        if self.threshold is not None:
            return self.threshold
        return 0.9 if self.policy == "calm" else 0.998

    @property
    def compares(self) -> str:
        """What is compared with the threshold: `confidence`, or "top-1" for `adp-c`."""
        return self.confidence if self.policy == "calm" else "top-1"

    def exits_of(self, blocks: int) -> tuple[int, ...]:
        """The blocks after which an exit head stands."""
        if self.exits is not None:
            return tuple(self.exits)
        thirds = (-(-third * blocks // 3) - 1 for third in (1, 2))
        return tuple(sorted({block for block in thirds if 0 <= block < blocks - 1}))

    def loss_weights(self, blocks: int) -> list[float]:
        """Weights of the losses of the exits, and of the head."""
        places = (*self.exits_of(blocks), blocks - 1)
        return [float(block + 1) if self.policy == "calm" else 1.0 for block in places]

    def gpt_layers(self, layers: Any) -> Any:
        return import_module(".layers", __package__).gpt_layers(self, layers)

    def hugging_face_layers(self, kinds: Any) -> Any:
        return import_module(".hugging_face", __package__).layers_of(self, kinds)

    def layers_added(self, model: ModelOptions) -> int:
        return len(self.exits_of(model.blocks))

    def start_of(self, steps: int | None) -> int:
        """The first step at which tokens exit."""
        if self.start is not None:
            return self.start
        assert steps is not None, "`problems` asks for the steps"
        return 3 * steps // 10

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.early_exit", run.model
        yield from super().problems(run)
        if model is not None and model.is_gpt:
            exits = self.exits_of(model.blocks)
            if not exits:
                yield (
                    f"{key}: a model of {model.blocks} blocks has no place for an exit; use more "
                    f"blocks, or name one in {key}.exits"
                )
            elif list(exits) != sorted(set(exits)):
                yield f"{key}.exits = {list(exits)} must ascend, each block once"
            elif exits[-1] >= model.blocks - 1:
                yield (
                    f"{key}.exits names block {exits[-1]}, but an exit can stand after the blocks "
                    f"0 to {model.blocks - 2}; behind the last block is the head"
                )
        if self.policy == "adp-c" and self.confidence != "softmax":
            yield (
                f'{key}.confidence = "{self.confidence}" is of policy "calm"; leave it out, '
                'for "adp-c" compares the largest probability'
            )
        if run.steps is None and self.start is None:
            yield f"{key}: give start, or the steps of the run (steps=)"
        elif run.steps is not None and self.start_of(run.steps) >= run.steps:
            yield (
                f"{key}.start = {self.start_of(run.steps)}, but the run has {run.steps} steps, so "
                "no token would exit; start sooner"
            )

"""What a layer hands on: contiguous tensors, alike in all microbatches of a step.

An output that requires no gradient is constant: a mask, say, or a rotary table. The next layer's
input is then constant, too. It has no graph and no gradient, however far it is handed on. The first
microbatch decides for all whose messages its header announces (`Outputs.like_first`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dynmo.errors import ConfigError, RunError
from dynmo.runtime.comm.headers import MOST_TENSORS, Spec, is_plain, obstacle, spec_of
from dynmo.runtime.layer.joint_graph import Tensors, requiring


class Outputs:
    """The outputs of one layer.

    Args:
        name: The layer, for messages.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        # Outputs of the first microbatch of the program that runs, and which of them have a
        # gradient. The others are constants that are handed on, like rotary tables. If the batch is
        # ragged, the key is the shapes of the inputs.
        self._like: dict[Spec, tuple[Spec, tuple[bool, ...]]] = {}
        self._ragged = self._varies = False
        # Which outputs have required a gradient so far. Empty before the first step.
        self._have_trained: list[bool] = []

    def begin(self) -> None:
        """Begins a program: its first microbatch sets the shapes of all messages."""
        self._ragged = False
        self._varies = bool(getattr(self._module, "varying_shapes", False))
        self._like.clear()

    def expect_ragged(self) -> None:
        """Allows inputs of several shapes in this program, since each message has a header."""
        self._ragged = True

    def forget(self) -> None:
        self._have_trained.clear()

    def handed_on(self, out: object) -> Tensors:
        """Returns the module's outputs contiguous, as a message would arrive."""
        if is_plain(out):
            return (out,)
        outputs = as_tuple(out)
        problem = _problem(out, outputs)
        if problem is not None:
            raise ConfigError(f"{self._name} returned {problem}")
        return tuple(y.contiguous() for y in outputs)

    def differentiable(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, is_loss: bool
    ) -> tuple[Tensors, tuple[bool, ...]]:
        """Returns the outputs to hand on, and which of them get a gradient."""
        if is_loss:
            # The loss gets a gradient even if it requires none. Its graph is then empty.
            return outputs, (True,) * len(outputs)
        given = self.like_first(microbatch, inputs, outputs, graph=True)
        return given, tuple([y.requires_grad for y in given])

    def like_first(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, graph: bool
    ) -> Tensors:
        """Returns the outputs. Those that had a gradient in the first microbatch require one.

        In a ragged batch, the first microbatch with inputs of the same shapes counts. Outputs that
        vary in shape have a header for each microbatch, so they may vary in this, too.

        Raises:
            RunError: Outputs have other shapes than in the first microbatch, or a gradient that
                they had not. One rank refuses them, too, so that any number of ranks trains the
                same models.
        """
        if self._varies or self._is_like_first(outputs):
            return outputs
        spec, found = spec_of(outputs), tuple([y.requires_grad for y in outputs])
        like = spec_of(inputs) if self._ragged else ()
        if like not in self._like:
            self._like[like] = spec, self._may_train(outputs) if graph else found
        first_spec, first = self._like[like]
        what = f"{self._name} returned"
        if spec != first_spec:
            raise RunError(
                f"{what} {_described(spec)} in microbatch {microbatch}, and "
                f"{_described(first_spec)} before in the step; pad the tensors, or give the layer "
                "the attribute varying_shapes = True"
            )
        if any(now and not before for now, before in zip(found, first, strict=True)):
            raise RunError(
                f"{what} an output that requires a gradient in microbatch {microbatch}, and none "
                "in the first of the step; let it require one in all"
            )
        return tuple(
            y if now == before else requiring(y)
            for y, now, before in zip(outputs, found, first, strict=True)
        )

    def _is_like_first(self, outputs: Tensors) -> bool:
        """A quick answer for one output."""
        if self._ragged or len(outputs) != 1 or not self._like:
            return False
        ((dtype, shape), *_), differentiable = self._like[()]
        [y] = outputs
        return y.dtype is dtype and y.shape == shape and (y.requires_grad,) == differentiable

    def _may_train(self, outputs: Tensors) -> tuple[bool, ...]:
        """Returns which outputs require a gradient, or have in an earlier step.

        A layer may hand on its input now and then, which is a constant behind frozen layers. If
        nothing of a layer that trains requires a gradient, all floats may in another microbatch.
        """
        found = [y.requires_grad for y in outputs]
        if len(self._have_trained) == len(found):
            found = [now or before for now, before in zip(found, self._have_trained, strict=True)]
        elif not any(found) and any(p.requires_grad for p in self._module.parameters()):
            found = [y.is_floating_point() for y in outputs]
        self._have_trained = found
        return tuple(found)


def _problem(out: object, outputs: tuple[Any, ...]) -> str | None:
    """Returns why a layer cannot hand on its outputs, or None if it can."""
    if len(outputs) > MOST_TENSORS:
        return (
            f"{len(outputs)} tensors; a layer hands on at most {MOST_TENSORS}, so let it stack them"
        )
    if not outputs:
        return f"an empty {type(out).__name__}; a layer hands on a tensor"
    for y in outputs:
        if not isinstance(y, Tensor):
            among = "" if y is out else f" among its {len(outputs)} outputs"
            return f"a {type(y).__name__}{among}; a layer hands on a tensor, or a tuple of tensors"
        reason = obstacle(y)
        if reason is not None:
            return reason
    return None


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _described(spec: Spec) -> str:
    return " and ".join(
        f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for dtype, shape in spec[:4]
    )

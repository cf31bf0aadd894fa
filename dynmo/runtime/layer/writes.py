"""What a layer's F writes to beside its outputs: inputs, weights, buffers, plain attributes.

A layer's first F's look. Later ones act on what was found: they get copies of inputs and buffers,
or one line says what the layer must not do. No checkpoint has plain attributes, and only numbers
and strings move with a layer. Many are harmless: a cached mask, or the last attention map. A layer
whose output they change is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dynmo.errors import ConfigError, RunError
from dynmo.models.reach import generators_of
from dynmo.runtime.comm.headers import is_alias
from dynmo.runtime.layer.buffers import BufferKey, BufferSet, Copies, has_same_bits, sum_of_bits
from dynmo.runtime.layer.census import OF_TORCH
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.reads import second_place_of

Call = Callable[[Tensors], Tensors]

_CONTAINERS = (list, dict, set)


class Writes:
    """The writes of one layer, with the loss if it has one.

    Args:
        name: The layer, for messages.
        watches: Whether to look at weights and plain attributes, too. Not on shapes alone.

    Attributes:
        in_backward: Whether B writes to buffers. It does if it runs parts of the module again
            (torch.utils.checkpoint). The first B shows it.
        counts_in: A buffer beside the model's state that F writes to and that decides its output.
    """

    counts_in: str | None = None

    def __init__(
        self, name: str, module: nn.Module, losses: Sequence[nn.Module], loss: object, watches: bool
    ) -> None:
        self._name, self._module, self._watches = name, module, watches
        self.buffers = BufferSet([module, *losses], generators_of(module, loss))
        # Buffers that F writes to in place, so that autograd counts the write.
        self._in_place: set[BufferKey] = set()
        self.in_backward = False
        # Whether F writes to its inputs, by (keeps a graph, training). The entries may differ.
        self._to_inputs: dict[tuple[bool, bool], bool] = {}
        # Whether F writes to weights, and whether it has in this program. A write that repeats what
        # it did (clamp, a mask) changes nothing any more.
        self._to_weights: bool | None = None
        self._has_written = False

    def begin(self) -> None:
        self._has_written = False

    def forget(self) -> None:
        self._to_inputs.clear()

    # -- inputs and weights ------------------------------------------------------------------------

    def to_inputs(self, graph: bool) -> bool | None:
        """Returns whether F writes to its inputs. None before the first F of its mode."""
        return self._to_inputs.get((graph, self._module.training))

    def run(self, call: Call, inputs: Tensors, graph: bool) -> tuple[Tensors, Tensors]:
        """Runs F, with copies of its inputs if it writes to them.

        Returns:
            Its outputs, and the inputs that it was given.
        """
        known = self.to_inputs(graph)
        copies = known is not False
        given = tuple([x.clone() for x in inputs]) if copies else inputs
        versions = [x._version for x in given]
        sums = graph and self._watches and self._to_weights is not False
        weights = _sums(self._module) if sums else None
        try:
            outputs = call(given)
        except RuntimeError as error:
            if copies or "a leaf Variable that requires grad" not in str(error):
                raise
            raise self._wrote(" or to a parameter") from error
        if weights is not None:
            self._look_at_weights(weights)
        if known is None:
            self._to_inputs[graph, self._module.training] = self._look_at_inputs(inputs, given)
        elif not copies and versions != [x._version for x in given]:
            raise self._wrote()
        return outputs, given

    def _look_at_inputs(self, inputs: Tensors, copies: Tensors) -> bool:
        written = [_differs(x, copy) for x, copy in zip(inputs, copies, strict=True)]
        for at, x in enumerate(inputs):
            if written[at] and is_alias(x):
                raise ConfigError(
                    f"{self._name} writes to its input {at} in place, which shares memory with "
                    "another tensor that an earlier layer handed on or keeps, and would change "
                    "that, too; let it compute with a copy"
                )
        return any(written)

    def _wrote(self, elsewhere: str = "") -> RunError:
        return RunError(
            f"{self._name} writes to its input{elsewhere} in place, which it did not in its first "
            "microbatch, and which is needed as it was; let it compute with a copy"
        )

    def _look_at_weights(self, before: dict[str, int]) -> None:
        """Raises ConfigError if F writes to a weight again and again, ahead of the B's."""
        after = _sums(self._module)
        written = next((name for name, value in after.items() if before.get(name) != value), None)
        if written is not None and self._has_written:
            raise ConfigError(
                f"{self._name}: its forward writes to its parameter {written!r} each time it runs, "
                "but the forwards of several microbatches run before a backward; keep what changes "
                "in a buffer, or write to the parameter between steps"
            )
        self._has_written = written is not None
        self._to_weights = bool(self._to_weights) or self._has_written

    # -- buffers and plain attributes --------------------------------------------------------------

    def renew(self) -> None:
        """Precedes F: the backward of an earlier microbatch may need buffers that F writes to."""
        self.buffers.renew(self._in_place)

    def keep(
        self, run: Callable[[], Tensors], again: Callable[[], Tensors], first: bool, keeps: bool
    ) -> tuple[Tensors, Copies]:
        """Runs an F that B follows.

        Args:
            again: Runs F again.
            first: Whether to look at what it writes to.
            keeps: Whether B needs the buffers as they were.

        Returns:
            The outputs, and the values that F found in the buffers that it wrote to.

        Raises:
            ConfigError: The layer has state that would not follow it.
        """
        buffers = self.buffers
        before = buffers.copies() if keeps else {}
        self.renew()
        if not first:
            return run(), buffers.written(before, waits=False) if keeps else {}
        versions = {key: (buffer, buffer._version) for key, buffer in buffers}
        state = PlainState(self._module) if self._watches else None
        outputs = run()
        written = buffers.written(before, waits=False)
        self._in_place.update(
            key for key, (buffer, version) in versions.items() if buffer._version != version
        )
        if state is not None:
            self._check_first(state, written, outputs, again)
        return outputs, written

    def _check_first(
        self,
        state: PlainState,
        written: Copies,
        outputs: Tensors,
        again: Callable[[], Tensors],
    ) -> None:
        """Looks at what the first F has written to.

        Args:
            state: The attributes before it.
            written: The buffers that it wrote to, before it.
        """

        def repeats(buffers: Copies) -> bool:
            """Returns whether F has the same output when it runs again."""
            # Fake tensors have no values, and kernels of a GPU may round otherwise each time.
            ours = [y.detach() for y in outputs]
            if not all(type(y) is Tensor and y.is_cpu for y in ours):
                return True
            with self.buffers.replaced(buffers):
                return all(map(has_same_bits, ours, [y.detach() for y in again()]))

        if (attribute := state.written()) is not None:
            now = PlainState(self._module)
            if not repeats(written):
                raise ConfigError(
                    f"{self._name}: its forward writes to its attribute {attribute!r} and has "
                    "another output when it runs again. Such state is neither moved, saved nor put "
                    "back; keep it in a buffer (register_buffer)"
                )
            now.restore()
        if self._in_place:
            # `renew` replaces them.
            names = {*map(self.buffers.name_of, self._in_place)}
            if (reason := second_place_of(self._module, names)) is not None:
                raise ConfigError(f"{self._name} {reason}")
        if name := self.buffers.first_of(written, persistent=False):
            self.counts_in = None if repeats(self.buffers.copies()) else name


def _differs(original: Tensor, copy: Tensor) -> bool:
    """Returns whether a fresh copy was written to. `.data` does not raise its version."""
    return copy._version > 0 or (
        type(copy) is Tensor and not has_same_bits(original.detach(), copy)
    )


def _sums(module: nn.Module) -> dict[str, int]:
    """Returns a sum of the bits of each parameter that only its own optimizer may change."""
    return {
        f"{prefix}.{name}".lstrip("."): sum_of_bits(p)
        for prefix, part in module.named_modules()
        for name, p in part._parameters.items()
        # Embeddings renormalise the rows that they read, each once.
        if p is not None and type(p) is nn.Parameter and getattr(part, "max_norm", None) is None
    }


class PlainState:
    """The attributes of a module and its submodules now, except for dynmo's own."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = {
            prefix: vars(part)
            for prefix, part in module.named_modules()
            if not type(part).__module__.startswith("dynmo.")
        }
        self._before = {key: (value, _contents(value)) for key, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[tuple[str, str], object]]:
        for prefix, owner in self._owners.items():
            for name, value in owner.items():
                if name not in OF_TORCH:
                    yield (prefix, name), value

    def written(self) -> str | None:
        """Returns the name of the first attribute that has another value now, or None."""
        for key, value in self._attributes():
            before = self._before.get(key)
            if before is None or not _is_same(*before, value):
                return ".".join(key).lstrip(".")
        return None

    def restore(self) -> None:
        """Binds every attribute to the object that it was bound to."""
        for (prefix, name), (value, _) in self._before.items():
            self._owners[prefix][name] = value


def _contents(value: Any) -> object:
    """Returns a copy of a value that may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(value) if isinstance(value, _CONTAINERS) else value


def _is_same(before: object, contents: Any, now: Any) -> bool:
    if isinstance(now, Tensor):
        return has_same_bits(contents, now)
    if isinstance(now, _CONTAINERS):
        return before is now and [*map(id, contents)] == [*map(id, now)]
    return before is now or (isinstance(now, int | float | str | bytes) and before == now)

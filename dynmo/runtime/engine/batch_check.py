"""Checks what ranks are given for a step, and finds ranks that were given different batches.

The inputs are used on the first stage and the targets on the last. If they are of different
batches, the model trains on pairs that do not belong together. So each rank hashes what it was
given, and the ranks compare the hashes with the table of a step's end.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from dynmo.errors import InputError
from dynmo.runtime.comm.headers import spec_of
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.state.layer_store import LayerStore

# A hash is at most 2**51, so that float64 holds it exactly.
_BITS = 51
# Odd multipliers that mix the position of an element (splitmix64).
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)
# Elements that are hashed at once. It limits the memory.
_PART = 1 << 20
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Inputs: TypeAlias = Tensor | Sequence[tuple[Tensor, ...]] | None
"""Microbatches [microbatches, ...], or the first layer's arguments for each microbatch."""
Targets: TypeAlias = Tensor | Sequence[Tensor | Mapping[str, Tensor]] | None


class StepBatch(NamedTuple):
    """What this rank is given for a step.

    Attributes:
        inputs: This replica's microbatches, on the rank of the first stage. Every replica has as
            many. They follow those of the replica before it in the batch.
        targets: Likewise, on the rank of the last stage.
        work: Operations of this replica's batch, on the rank of the first stage. Every rank gets
            the sum in `StepRecord.work`.
    """

    inputs: Inputs
    targets: Targets
    work: Tensor | float = 0.0


class StepSettings(NamedTuple):
    """How a step trains, the same on every rank but for the flag.

    Attributes:
        step: Number of the step.
        rates: Learning rate, or all options of each group of parameters.
        max_norm: Norm to clip the gradients to. 0 clips nothing.
        flag: Number that every rank gets in `StepRecord.flags`, such as a wish to stop.
    """

    step: int
    rates: Rates
    max_norm: float = 0.0
    flag: int = 0

    def check(self) -> None:
        rates, max_norm = self.rates, self.max_norm
        for rate in [x.get("lr", 0.0) for x in rates] if isinstance(rates, Sequence) else [rates]:
            if not isinstance(rate, Real | Tensor) or not 0 <= float(rate) < math.inf:
                raise InputError(f"lr = {rate!r}; give a finite number of at least 0")
        if not isinstance(max_norm, Real) or not float(max_norm) >= 0:
            raise InputError(
                f"max_norm = {max_norm!r}; give a number of at least 0, where 0 clips nothing"
            )


def fingerprint(batch: Tensor) -> Tensor:
    """Hashes values, order and shape of a batch, without waiting for its device."""
    values = batch.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.reshape(-1)
    if values.is_floating_point() or values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        values = values.view(_SIGNED[values.element_size()])
    total = torch.full((), zlib.crc32(repr(tuple(batch.shape)).encode()), device=batch.device)
    for start in range(0, len(values), _PART):
        part = values[start : start + _PART]
        # A pseudo-random weight for each position. Sums of int64 wrap around, in any order.
        weights = torch.arange(start + 1, start + 1 + len(part), device=batch.device)
        for multiplier in _MIX:
            weights *= multiplier
            weights ^= weights >> 31
        total += (weights * part).sum()
    return ((total >> (63 - _BITS)) & ((1 << _BITS) - 1)) + 1


# What ranks of a replica must be given alike.
COMPARED = ("inputs", "targets", "numbers of rows")
Hashes: TypeAlias = tuple[Tensor | int | None, ...]


def hashes_to_compare(world: RankGroup, batch: StepBatch) -> Hashes:
    """Returns hashes of inputs and targets, and the number of rows, if it is known.

    None if this rank has its pipeline to itself.
    """

    def hashed(part: Inputs | Targets) -> Tensor | None:
        if part is None or world.size == 1:
            return None
        if isinstance(part, Tensor):
            return fingerprint(part)
        return fingerprint(torch.stack([fingerprint(each) for each in tensors_of(part)]))

    inputs, targets, _ = batch
    given = [x for x in (inputs, targets) if isinstance(x, Tensor) and x.dim() > 1]
    rows = given[0].shape[0] * given[0].shape[1] if given and world.size > 1 else None
    return hashed(inputs), hashed(targets), rows


def is_ragged(inputs: Inputs) -> bool:
    """Returns whether the microbatches have several shapes."""
    if inputs is None or isinstance(inputs, Tensor):
        return False
    return len({spec_of(each) for each in inputs}) > 1


def tensors_of(batch: object) -> Iterator[Tensor]:
    """Yields the tensors of a batch in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    several = batch.values() if isinstance(batch, Mapping) else batch
    for each in cast("Iterable[object]", several):
        yield from tensors_of(each)


def find_difference(
    when: str, hashes: Sequence[Sequence[float]], replicas: int
) -> InputError | None:
    """Returns the error of ranks that were given different batches."""
    for replica in range(replicas):
        differing = list[str]()
        ranks = set[int]()
        for name, row in zip(COMPARED, hashes, strict=True):
            given = {rank: row[rank] for rank in range(replica, len(row), replicas) if row[rank]}
            if len(set(given.values())) > 1:
                differing.append(name)
                ranks |= given.keys()
        if differing:
            of = f" of replica {replica}" if replicas > 1 else ""
            return InputError(
                f"{when}: ranks {', '.join(map(str, sorted(ranks)))}{of} passed different "
                f"{' and '.join(differing)}; the ranks of a replica pass the same batch, replicas "
                "pass their own: seed the sampler by replica (rank % replicas), and use no "
                "DistributedSampler over the ranks"
            )
    return None


def check_batch(
    store: LayerStore,
    given: StepBatch,
    microbatches: int,
    needs_targets: bool = True,
) -> None:
    stages, world = store.own_stages, store.world
    last = len(store.layout.stage_ranks) - 1
    for name, batch, stage, holder in (
        ("inputs", cast(object, given.inputs), 0, "first"),
        ("targets", given.targets, last, "last"),
    ):
        if batch is None:
            if stage in stages and (needs_targets or name == "inputs"):
                advice = (
                    "pass them as the second argument, which is step(*batch) for the pair of a "
                    f"DataLoader, or in a dictionary as {', '.join(store.model.targets)}"
                    if name == "targets"
                    else "pass the batch"
                )
                raise InputError(
                    f"{name} is None, but rank {world.rank} holds the {holder} stage; {advice}"
                )
            continue
        if not isinstance(batch, Tensor | list):
            raise InputError(
                f"{name} is a {type(batch).__name__}; give one tensor [microbatches, ...] "
                "(torch.stack, torch.as_tensor), or a list of microbatches"
            )
        tensors = cast("Tensor | list[object]", batch)
        count = len(tensors) if isinstance(tensors, list) or tensors.dim() else 0
        if count != microbatches:
            own = " of this replica's own" if world.replicas > 1 else ""
            shape = f", shape {list(batch.shape)}" if isinstance(batch, Tensor) else ""
            raise InputError(
                f"{name}: {count or 'no'} microbatches{shape}, where "
                f"{microbatches}{own} are expected; the first dimension counts microbatches"
            )

"""Options of plans: `dynmo.Balance` and `dynmo.Elastic`, the sections [balance] and [elastic]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from pydantic import AfterValidator

from dynmo.options import (
    OWN,
    Count,
    Lax,
    Listed,
    NonNegative,
    Options,
    Timeout,
    check_ascending,
    written,
)

if TYPE_CHECKING:
    ShapesAt: TypeAlias = Sequence[Sequence[int]]
else:
    Shape = Annotated[tuple[Count, Count, Count], Lax]
    ShapesAt = Annotated[tuple[Shape, ...], Lax, AfterValidator(check_ascending)]


BalancerName: TypeAlias = Literal["none", "uniform", "exact", "diffusion"]
BALANCERS: tuple[BalancerName, ...] = get_args(BalancerName)
OWN_BALANCER = "python:package.module:NAME"
Balancer: TypeAlias = BalancerName | Annotated[str, written(OWN, OWN_BALANCER)]


class Balance(Options):
    """Decides where layers live: by which algorithm, by which cost and how often."""

    balancer: Balancer = "exact"
    """Algorithm that places the layers, or your own: `python:package.module:NAME`."""
    cost: Literal["time", "parameters"] = "time"
    """Cost of a layer: its measured seconds, or its number of parameters."""
    every: Literal["auto"] | Count = "auto"
    """Steps between two decisions, or `auto`: decide when the work or the imbalance of the ranks
    has changed."""
    initial: Listed[Count] | None = None
    """First placement: number of layers on each stage. Not set: as even as possible."""
    margin: NonNegative = 1.0
    """A move must save this many times the seconds that it takes."""
    hysteresis: NonNegative = 0.02
    """A move must save at least this share of a step."""
    move_ahead: bool = False
    """Whether the layers of a move travel while the next step runs, which then still has the old
    placement. If not, the ranks wait for them between two steps."""


class Elastic(Options):
    """Changes of the mesh and of the number of ranks while training."""

    repack: bool = False
    """Whether the run leaves ranks that it does not need, and takes them back when it does."""
    tolerance: NonNegative = 0.05
    """With `repack`: share by which a step may take longer than the first measured steps did."""
    algorithm: (
        Literal["fewest", "first-fit"] | Annotated[str, written(OWN, "python:package.module:NAME")]
    ) = "fewest"
    """How `repack` chooses: the `fewest` ranks that are fast enough, or by memory
    alone: `first-fit` (DynMo's algorithm 4) or a rule of your own, `python:package.module:NAME`."""
    min_ranks: Count = 1
    """Fewest ranks that `repack` may leave."""
    target_ranks: Count | None = None
    """Ranks that the run goes to as soon as it can. Not set: `repack` decides."""
    retune: bool = False
    """Whether a change of ranks may also change `train.micro_batch`, at the same global batch. The
    numbers are then no longer those of one rank."""
    reshape: bool = False
    """Whether the run may choose another mesh of the same ranks when the work has changed."""
    reshape_at: ShapesAt = ()
    """`[[step, pipeline, replicas], ...]`: from each step on, the mesh has these sizes. With fewer
    ranks the others leave. With more ranks the run waits for newcomers."""
    releaser: Literal["auto", "none", "command", "kubernetes"] = "auto"
    """Who takes ranks back and gives others. `auto` is dynmo's launcher if it started the ranks,
    and `none` otherwise."""
    release_command: Listed[str] = ()
    """With `releaser = "command"`: program and arguments that give ranks back."""
    grow_command: Listed[str] = ()
    """With `releaser = "command"`: program and arguments that start `dynmo train --join`."""
    park: bool = False
    """Whether ranks that leave wait, without tensors, until they are called back. If not, their
    processes end."""
    job_options: Listed[str] = ()
    """Options of `srun` for ranks that are Slurm jobs of their own, such as `--partition=p`."""
    join_timeout: Timeout = 60.0
    """Seconds that the run waits for ranks that it needs. It then goes on without them."""
    recover: Literal["none", "memory"] = "none"
    """Whether the run survives a dead rank. With `memory` each rank keeps copies of its own layers
    and of another rank's in host memory."""
    recover_every: Count = 1
    """With `recover`: steps between two copies. After a fault the run repeats up to one more."""

    def _problems(self) -> Iterator[str]:
        target = self.target_ranks
        which = "elastic.repack = true" if self.repack else f"elastic.target_ranks = {target}"
        if self.changes_ranks and (self.reshape or self.reshape_at):
            other = "elastic.reshape" if self.reshape else "elastic.reshape_at"
            yield f"{which} chooses the mesh, too; leave out {other}"
        if self.reshape and self.reshape_at:
            yield (
                "elastic.reshape = true decides when to reshape, and elastic.reshape_at says "
                "when; leave one of them out"
            )
        if self.retune and not self.changes_ranks:
            yield (
                "elastic.retune = true is for elastic.repack or elastic.target_ranks; set one of "
                "them, or leave retune out"
            )
        if self.algorithm != "fewest" and not self.repack:
            yield (
                f'elastic.algorithm = "{self.algorithm}" is for elastic.repack = true; set that, '
                "or leave the algorithm out"
            )
        if target is not None and target < self.min_ranks:
            yield (
                f"elastic.target_ranks = {target} is less than elastic.min_ranks = "
                f"{self.min_ranks}; use at least that many"
            )
        if self.recover == "none" and self.recover_every != 1:
            yield (
                'elastic.recover_every is for elastic.recover = "memory"; set that, or leave '
                "recover_every out"
            )
        commands = [key for key in ("release_command", "grow_command") if getattr(self, key)]
        if self.releaser == "command" and not commands:
            yield (
                'elastic.releaser = "command" needs elastic.release_command or elastic.grow_command'
            )
        if self.releaser != "command" and commands:
            yield (
                f'elastic.{commands[0]} is for elastic.releaser = "command"; set that, or leave '
                "the command out"
            )

    @property
    def changes_ranks(self) -> bool:
        """True if the run decides how many ranks it has."""
        return self.repack or self.target_ranks is not None

    def shape_at(self, step: int) -> tuple[int, int] | None:
        """The mesh that `reshape_at` plans for a step: ranks of a pipeline, and replicas."""
        shapes = [(pipeline, data) for at, pipeline, data in self.reshape_at if at <= step]
        return shapes[-1] if shapes else None

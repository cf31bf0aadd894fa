"""`Pipeline` trains one model over a world, in a user's own training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynmo.balance.partition import Partition, uniform
from dynmo.config import Balance, parse
from dynmo.cost.layer_cost import LayerCost
from dynmo.dynamism import Dynamism, Signals
from dynmo.dynamism.case import TokenShares
from dynmo.errors import CheckpointError, ConfigError, InputError, RunError
from dynmo.models.model import Model
from dynmo.models.sequential import Sequential
from dynmo.pipeline.case_context import agree_on_cases
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.optimizers import SGD, AdamW, OptimizerHandle
from dynmo.pipeline.options import StepOptions, UpdateOptions
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import find_checkpoint, restore_engine, save_engine
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.messages import ranks_text
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.step_reduction import StepResult
from dynmo.runtime.layer.precision import PRECISIONS
from dynmo.runtime.state.layer_options import LayerOptions, ReplicaOptions
from dynmo.schedule.catalogue import placement_of
from dynmo.schedule.op import Schedule


class Pipeline:
    """Trains one model over the ranks of a world.

    All ranks call every method together, with equal arguments. Batches are the exception. A rank
    that holds neither the first nor the last stage may pass None for inputs and targets.

    Args:
        model: The model to train, such as `dynmo.Sequential`.
        world: The ranks, from `dynmo.init`.
        schedule: Name of the schedule, such as "1f1b", "zb-h1", "zb-auto" or "zb-v".
        microbatches: Number of microbatches of a step, on each replica.
        optimizer: `dynmo.AdamW` or `dynmo.SGD`.
        balance: "auto" moves layers between ranks when the work has become uneven and a move repays
            itself. "none" leaves them where they are. `dynmo.Balance` sets all options.
        partition: Number of layers on each stage at first. The default is `balance.initial`, and
            as even as possible without that.
        replicas: Number of pipelines that train side by side. It must divide the ranks. Gradients
            are added per replica and then over the replicas, so another number gives other bits.
        expert: Number of replicas that share one set of experts. It must divide the replicas.
        max_norm: Gradients are clipped to this norm over all layers. 0 does not clip.
        memory_limit: Bytes of each rank, for the placement and for schedules that are made within
            a limit. None means unlimited.
        precision: "float32", "bfloat16" or "float16". Weights have a float32 master.
        recompute: Global indices of the layers whose activations are recomputed in the backward.
        cases: Dynamic cases that act before each step.
        horizon: Number of further steps within which a move must repay itself.
        seed: Seeds the random numbers of layers while training, such as dropout.

    Raises:
        ConfigError: An option is wrong, or the ranks have different modules or code.

    Example:
        >>> import torch
        >>> import dynmo
        >>> with dynmo.init() as world:
        ...     layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        ...     model = dynmo.Sequential(layers, loss=torch.nn.functional.mse_loss)
        ...     pipeline = dynmo.Pipeline(model, world, schedule="1f1b", microbatches=2)
        ...     result = pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))
        >>> result.loss > 0
        True
    """

    def __init__(
        self,
        model: Model,
        world: World,
        *,
        schedule: str = "zb-auto",
        microbatches: int,
        optimizer: AdamW | SGD | None = None,
        balance: Literal["auto", "none"] | Balance = "auto",
        partition: Partition | Sequence[int] | None = None,
        replicas: int = 1,
        expert: int = 1,
        max_norm: float = 0.0,
        memory_limit: int | None = None,
        precision: Literal["float32", "bfloat16", "float16"] = "float32",
        recompute: Collection[int] = (),
        cases: Sequence[Dynamism] = (),
        horizon: int = 1000,
        seed: int = 0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision = {precision!r}; choose from {', '.join(PRECISIONS)}")
        _check_kinds(model, world, optimizer)
        options = optimizer or AdamW()
        self._max_norm, self._horizon, self._cases = max_norm, horizon, tuple(cases)
        self._balance = _balance_of(balance)
        self._microbatches, self._schedule, self._dtype = (
            microbatches,
            schedule,
            PRECISIONS[precision],
        )
        self._optimizer, self._optimizer_name = OptimizerHandle(options.lr), options.settings.name
        if isinstance(model, Sequential):
            _agree_on_modules(model, world)
        mesh = arrange(world, replicas)
        stages = len(placement_of(schedule, mesh.size))
        counts = _first_partition(partition, self._balance.initial, model.layers, stages)
        self._engine = Engine(
            mesh,
            model,
            counts,
            StepOptions(
                schedule, microbatches=microbatches, memory_limit=memory_limit, recompute=recompute
            ),
            update=UpdateOptions(optimizer=options.settings),
            layers=LayerOptions(dtype=self._dtype, seed=seed),
            replicas=ReplicaOptions(expert=expert),
        )
        self._step, self._loss = 0, math.nan
        agree_on_cases(world, self._cases)
        self._case_calls = Cases(self._cases, self._engine)
        self._token_shares: dict[str, TokenShares] = {}
        self._rebalancer = self._make_rebalancer()

    # -- training ----------------------------------------------------------------------------------

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> StepResult:
        """Trains on one batch: forward, backward, clipping, optimizer.

        The batch is cut along its first dimension. Dynamic cases act before the step. Layers then
        move if balancing decides so.

        Args:
            inputs: This replica's batch, [batch, ...]. `microbatches` must divide `batch`. Only the
                rank of the first stage needs it. Floats are converted to `precision`.
            targets: Targets of the loss, [batch, ...]. Only the rank of the last stage
                needs it. All ranks of a replica that pass a batch pass the same one.

        Returns:
            The loss, the gradient norm before clipping, and the work of each rank. It is the same
            on every rank. The loss is the mean of the microbatches' means, whatever the number of
            targets that count in each (those that are not -100).

        Raises:
            InputError: The batch is missing or cannot be cut, or ranks of one replica pass
                different batches. No weight was changed.
            RunError: The loss or a gradient is not finite, or no target of a microbatch counts.
        """
        cut_inputs, cut_targets = self._cut_inputs(inputs), self._cut("targets", targets)
        for case, shares in self._case_calls.collect(self._step):
            self._token_shares[case.name] = shares
        if self._rebalancer.is_due(self._step):
            self._rebalancer.consider(self._step)
        for _ in self._case_calls.act(self._step):
            self._rebalancer.on_workload_change(self._step)
        start, rate = time.perf_counter(), self._optimizer.lr
        result = self._engine.step(
            self._step, cut_inputs, cut_targets, lr=rate, max_norm=self._max_norm
        )
        self._optimizer.step()
        self._rebalancer.observe(self._step, time.perf_counter() - start, result.busy)
        self._case_calls.observe(Signals(self._step, result.loss, result.squared_norms, rate))
        self._step, self._loss = self._step + 1, result.loss
        return result

    def evaluate(
        self, inputs: Tensor | None, targets: Tensor | None, *, dense: bool = False
    ) -> float:
        """Computes the mean loss of one batch without training.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            dense: Whether cases compute everything, such as tokens that they would let go.

        Returns:
            The mean loss over all replicas' microbatches, the same on every rank.

        Raises:
            InputError: The batch is missing or cannot be cut, or ranks of one replica pass
                different batches.
        """
        with ExitStack() as off:
            for context in self._case_calls.dense() if dense else ():
                off.enter_context(context)
            return self._engine.evaluate(
                self._cut_inputs(inputs),
                self._cut("targets", targets),
                self._microbatches,
                shares=True,
            )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Holds the learning rate for torch's schedulers.

        They take it as in `LambdaLR(pipeline.optimizer, ...)`.
        """
        return self._optimizer

    @property
    def steps(self) -> int:
        """Number of steps that are done, those of a loaded checkpoint included."""
        return self._step

    @property
    def token_shares(self) -> Mapping[str, TokenShares]:
        """What each case has counted last, by its name, such as the load of experts.

        Cases count at the start of the next step.
        """
        return self._token_shares

    # -- places of layers --------------------------------------------------------------------------

    @property
    def partition(self) -> Partition:
        """Number of layers on each stage."""
        return self._engine.partition

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next step."""
        return self._engine.schedule_for(self._engine.partition)

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The layers that this rank holds, by their index in the model.

        A move changes them.
        """
        return {index: self._engine.modules[index] for index in self._engine.own_layers}

    def costs(self) -> tuple[LayerCost, ...]:
        """Returns the measured cost of every layer: seconds per microbatch, and bytes."""
        return self._engine.costs()

    def rebalance(self) -> bool:
        """Decides now on the placement of layers, and moves them if that repays itself.

        A move must repay itself within `horizon` steps.

        Returns:
            True if layers have moved.

        Raises:
            RunError: No step has been measured yet.
        """
        if not self._rebalancer.measured:
            raise RunError(
                "rebalance was called before a step was measured; train at least one step first"
            )
        before = self._engine.partition
        self._rebalancer.consider(self._step)
        return self._engine.partition != before

    def move(self, partition: Partition | Sequence[int]) -> None:
        """Moves layers to `partition`, with gradients and optimizer state.

        Args:
            partition: Number of layers on each stage, first stage first.

        Raises:
            PartitionError: It has another number of layers or stages.
        """
        self._engine.move(
            partition if isinstance(partition, Partition) else Partition(tuple(partition))
        )

    # -- trained layers ----------------------------------------------------------------------------

    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. Their optimizer state stays.

        Args:
            layers: Indices in the model. A frozen prefix of the model runs no backward.

        Raises:
            PartitionError: There is no such layer, or none would train.
        """
        self._engine.freeze(layers)
        self._rebalancer.on_workload_change(self._step)

    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains frozen layers again, from the optimizer state that they had.

        Args:
            layers: Indices in the model.

        Raises:
            PartitionError: There is no such layer.
        """
        self._engine.unfreeze(layers)
        self._rebalancer.on_workload_change(self._step)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """Saves weights, optimizer state and the loop's own state.

        All ranks share the folder.

        Args:
            folder: Holds the checkpoints of this training, each in a folder `step-N`.
            keep: Number of checkpoints that stay, this one included.

        Returns:
            The folder of this checkpoint.

        Raises:
            RunError: A rank could not write its part. Older checkpoints are untouched.
        """
        saved = save_engine(
            self._engine,
            Path(folder),
            self._step,
            keep,
            self._cases,
            loss=self._loss,
            moves=self._rebalancer.moves,
            extra={"lr": self._optimizer.lr, "optimizer": self._optimizer_name},
        )
        return saved.path

    def load(self, folder: str | Path) -> int:
        """Goes on from the newest complete checkpoint in `folder`.

        The checkpoint may be of any placement. A warning names the model's code that has changed
        since. The caller keeps the state of a learning-rate
        scheduler, and saves its `state_dict` beside the checkpoint.

        Args:
            folder: Folder that `save` was given.

        Returns:
            The number of steps that are done.

        Raises:
            CheckpointError: There is no complete checkpoint, or it is of another model or
                optimizer.
        """
        engine = self._engine
        path, manifest = find_checkpoint(Path(folder), engine.world.everyone)
        state = manifest.state
        if tuple(manifest.layers) != tuple(engine.names):
            raise CheckpointError(
                f"{path} has {len(manifest.layers)} layers of other names than this model's "
                f"{engine.count}; load it into that model"
            )
        if not state.keys() >= {"lr", "optimizer"}:
            raise CheckpointError(
                f"{path} was not written by Pipeline.save: its state has no 'lr' or 'optimizer'"
            )
        if state["optimizer"] != self._optimizer_name:
            raise CheckpointError(
                f"{path} has the state of {state['optimizer']}, and this pipeline trains with "
                f"{self._optimizer_name}"
            )
        restore_engine(engine, path, state, self._cases)
        self._optimizer.param_groups[0]["lr"] = state["lr"]
        self._step, self._loss = manifest.step, state["loss"]
        self._rebalancer = self._make_rebalancer(state["moves"])
        return self._step

    def digest(self) -> str:
        """Returns the SHA-256 of all weights. It is equal exactly if all weights are."""
        return self._engine.digest()

    # -- helpers -----------------------------------------------------------------------------------

    def _cut_inputs(self, inputs: Tensor | None) -> Tensor | None:
        """Cuts like `_cut`, in the precision of the first layer."""
        batch = self._cut("inputs", inputs)
        return batch.to(self._dtype) if batch is not None and batch.is_floating_point() else batch

    def _cut(self, name: str, batch: Tensor | None) -> Tensor | None:
        """Reshapes [batch, ...] to [microbatches, batch / microbatches, ...]."""
        if batch is None:
            return None
        count = self._microbatches
        if not isinstance(batch, Tensor) or not batch.dim() or len(batch) % count or not len(batch):
            what = (
                f"a tensor of shape {list(batch.shape)}"
                if isinstance(batch, Tensor)
                else f"a {type(batch).__name__}"
            )
            raise InputError(
                f"{name} is {what}; give a tensor whose first dimension is a multiple of {count} "
                "microbatches"
            )
        return batch.unflatten(0, (count, len(batch) // count))

    def _make_rebalancer(self, moves: int = 0) -> Rebalancer:
        """Makes a rebalancer with the options of a run of `horizon` steps from now on."""
        engine = self._engine
        ranks, replicas = engine.shape
        config = parse(
            {
                "train": {
                    "steps": self._step + self._horizon,
                    "global_batch": self._microbatches * replicas,
                    "micro_batch": 1,
                },
                "parallel": {"pipeline": ranks, "data": replicas},
                "pipeline": {"schedule": self._schedule},
                "balance": self._balance.model_dump(exclude={"initial"}),
            }
        )
        return Rebalancer(
            config,
            engine,
            engine.costs,
            moves,
            self._case_calls.forecasts,
        )


def _check_kinds(model: Any, world: Any, optimizer: Any) -> None:
    """Raises ConfigError if an argument is another kind of thing, such as torch's optimizer."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"model is {_kind(model)}; wrap the list of its layers in dynmo.Sequential([...])"
        )
    if not isinstance(world, World):
        raise ConfigError(f"world is {_kind(world)}; give what dynmo.init() returns")
    if optimizer is not None and not isinstance(optimizer, AdamW | SGD):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)}; give dynmo.AdamW(lr=...) or dynmo.SGD(lr=...), "
            "from which each rank makes the optimizers of its layers"
        )


def _kind(given: object) -> str:
    of = given if isinstance(given, type) else type(given)
    name = f"{of.__module__}.{of.__qualname__}".removeprefix("builtins.")
    return f"the class {name}" if of is given else f"an object of {name}"


def _first_partition(
    partition: Partition | Sequence[int] | None,
    initial: tuple[int, ...] | None,
    layers: int,
    stages: int,
) -> Partition:
    """Returns the first placement, as in a run from a file if only `balance.initial` is given."""
    if partition is None:
        if initial is None:
            return uniform(layers, stages)
        if len(initial) != stages or sum(initial) != layers:
            raise ConfigError(
                f"balance.initial = {initial} has {sum(initial)} layers and {len(initial)} stages; "
                f"this pipeline has {layers} and {stages}"
            )
        return Partition(initial)
    counts = partition if isinstance(partition, Partition) else Partition(tuple(partition))
    if initial is not None and counts.counts != initial:
        raise ConfigError(
            f"partition = {counts.counts} and balance.initial = {initial} differ; give one of them"
        )
    return counts


def _balance_of(balance: Any) -> Balance:
    if isinstance(balance, Balance):
        return balance
    if balance not in ("auto", "none"):
        raise ConfigError(
            f"balance = {balance!r}; choose 'auto', 'none', or give dynmo.Balance(...)"
        )
    return Balance(every="auto") if balance == "auto" else Balance(balancer="none")


def _agree_on_modules(model: Sequential, world: World) -> None:
    """Raises ConfigError on every rank if some rank has made other modules."""
    differs = first_difference(world, model.fingerprints(), "all ranks to make the model")
    if differs is not None:
        index, others = differs
        raise ConfigError(
            f"layer {index} has other shapes or weights on rank 0 than on {ranks_text(others)}; "
            "make the same modules on all ranks, after torch.manual_seed with one number"
        )

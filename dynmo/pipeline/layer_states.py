"""Saves, restores and compares the layers of an engine."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dynmo.models.identity import Identity
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.digest import buffers_digest, weights_digest
from dynmo.runtime.state.layer_store import LayerStore


class LayerStates:
    """Reads and replaces the weights and the optimizer state of this rank's layers.

    Args:
        layer_store: Holds the layers.
        pending: Knows whether the last step is final.
        programs: Hold the layers of the stages, and are lowered again when a layer is replaced.
    """

    def __init__(
        self, layer_store: LayerStore, pending: PostValidation, programs: Programs
    ) -> None:
        self._layer_store, self._pending, self._programs = layer_store, pending, programs

    @property
    def identity(self) -> Identity:
        """What decides the numbers of the layers, as they were made."""
        return self._layer_store.identity

    @property
    def own(self) -> dict[int, tuple[nn.Module, LayerOptimizer]]:
        """This rank's layers by their index in the model, each with its optimizer."""
        return {
            i: (layer.module, self._layer_store.optimizers[i])
            for i, layer in self._layer_store.layers.items()
        }

    def state(self, index: int, whole: bool = False) -> dict[str, Tensor]:
        """Returns the tensors that move and are saved with a layer's module.

        These are the optimizer state and the tensors that cases keep.

        Args:
            index: One of this rank's layers.
            whole: With ZeRO-1, whether to gather the state of all replicas' shares. All replicas
                then call it in the same order.
        """
        self._pending.assert_final()
        return self._layer_store.state(index, whole)

    def saved(self) -> Iterator[tuple[int, tuple[nn.Module, dict[str, Tensor]]]]:
        """Yields this rank's layers as a checkpoint has them, one whole layer at a time.

        The ranks of the first replica write for all.
        """
        for index in sorted(self._layer_store.layers):
            state = self.state(index, whole=True)
            with self._layer_store.whole(index) as module:
                if self._layer_store.world.replica == 0:
                    yield index, (module, state)

    def restore(
        self, index: int, tensors: dict[tuple[str, str], Tensor], flags: dict[str, bool]
    ) -> None:
        """Replaces one of this rank's layers by its tensors in a checkpoint.

        Args:
            index: One of this rank's layers.
            tensors: Tensors by section and name, from `checkpoint.load_layer`.
            flags: Flags, likewise.

        Raises:
            CheckpointError: The layer has another shape.
        """
        self._pending.assert_final()
        layer_store = self._layer_store
        tensors = layer_store.own_part(index, tensors)
        tensors = checkpoint.fit(
            index, layer_store.model.names[index], layer_store.modules[index], tensors
        )
        layer_store.replace(index, tensors, flags)
        self._programs.relower()

    def digest(self) -> str:
        """Returns a SHA-256 that is equal exactly if all weights are.

        It covers each layer's parameters in the model's order. Pruned parameters count in dense
        form. A parameter that computes in low precision counts by its float32 master.

        Raises:
            RunError: The replicas' weights differ.
        """
        return weights_digest(self._pending.final)

    def buffers_digest(self) -> str:
        """Returns the digest of the persistent buffers, like `digest`.

        Buffers that encode the sparsity of pruned weights do not count.
        """
        return buffers_digest(self._pending.final)

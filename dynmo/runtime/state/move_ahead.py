"""Moves layers while a step runs.

F, B and W leave weights and moments as they are. So these travel during the step. The rest follows
once the step's end is agreed on, and the new rank makes the update.

    step     source --- manifest ---> target                     threads, one layer after another
             source <-- room or no room --- target
             source --- weights, moments ---> target             while the source's rank waits
    its end  a migration (`migration.py`) of gradients, buffers and small state
    update   on the new ranks, or on the old ones if a layer cannot move
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dynmo.errors import RunError
from dynmo.plan.partition import Move
from dynmo.runtime.comm.headers import TAG_AHEAD
from dynmo.runtime.comm.idle_channel import IdleChannel
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.state.layer_tensors import Contents, Manifest
from dynmo.runtime.state.migration import Arrival, Migration, Packed, exchange, unpack


class MoveAhead:
    """Begins moves before a step. All ranks make it, with equal moves in layer order.

    Args:
        leaving: Returns a layer that leaves this rank (`migration.pack`).
    """

    def __init__(
        self, world: RankGroup, moves: Sequence[Move], leaving: Callable[[Move], Packed]
    ) -> None:
        self._world, self._moves, self._leaving = world, moves, leaving
        # Tensors that leave, by layer, with the version that counts writes to them.
        self._sent: dict[int, dict[tuple[str, str], tuple[Tensor, int]]] = {}
        self._here: dict[int, Contents] = {}
        self._failures: dict[int, Exception] = {}
        self._channel = IdleChannel(world, TAG_AHEAD, "layers that move")
        for move in moves:
            if move.source == world.rank:
                self._send(move)
            elif move.target == world.rank:
                self._channel.receive_by(partial(self._receive, move), move.source)
        world.everyone.channels.add(self._channel)

    def _send(self, move: Move) -> None:
        text, tensors = b"", list[Tensor]()
        try:
            whole, packed = self._leaving(move)
            manifest = Manifest.model_validate_json(whole)
            pairs = list(zip(manifest.tensors, packed, strict=True))
            stay = [(record, tensor) for record, tensor in pairs if record.stays_in_step]
            tensors = [tensor for _, tensor in stay]
            self._sent[move.layer] = {(r.section, r.name): (t, t._version) for r, t in stay}
            records = [record for record, _ in stay]
            text = manifest.model_copy(update={"tensors": records}).model_dump_json().encode()
        except Exception as error:
            self._failures[move.layer] = error

        def work() -> None:
            self._channel.put_text(text, move.target)
            if self._channel.get_answer(move.target):
                for tensor in tensors:
                    self._channel.put_tensor(tensor, move.target)

        self._channel.send_by(work, [move.target])

    def _receive(self, move: Move) -> None:
        text, tensors = self._channel.get_text(move.source), Contents()
        try:
            if text:
                tensors = unpack(text, move, self._world.device).tensors
        except Exception as error:
            self._failures[move.layer] = error
        self._channel.put_answer(bool(tensors), move.source)
        for tensor in tensors.values():
            self._channel.get_tensor(tensor, move.source)
        self._here[move.layer] = tensors

    def finish(
        self,
        check: Callable[[Move, Arrival], None],
        adopt: Callable[[list[Arrival]], None],
    ) -> Migration:
        """Ends the moves before weights change, as `exchange` does. All ranks call it together.

        Raises:
            NotMoved: Some rank could not give or take a layer. All stay where they were.
        """
        self._channel.wait()
        self._channel.close()

        def check_room(move: Move, arrival: Arrival) -> None:
            if move.layer in self._failures:
                raise self._failures[move.layer]
            check(move, arrival)

        return exchange(self._world, self._moves, self._rest, check_room, adopt, self._here)

    def _rest(self, move: Move) -> Packed:
        """Returns a layer without the tensors that have travelled."""
        if move.layer in self._failures:
            raise self._failures[move.layer]
        text, tensors = self._leaving(move)
        rest, sent = list[Tensor](), self._sent[move.layer]
        for record, tensor in zip(Manifest.model_validate_json(text).tensors, tensors, strict=True):
            key = record.section, record.name
            if key not in sent:
                rest.append(tensor)
            elif (tensor.data_ptr(), tensor._version) != (sent[key][0].data_ptr(), sent[key][1]):
                raise RunError(f"the step has written to {record.name} of layer {move.layer}")
        return text, rest

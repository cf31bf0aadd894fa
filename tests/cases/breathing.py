"""A case that freezes three quarters of the layers for a while, so that ranks leave."""

from dynmo.pipeline.case import Change, Dynamism

FIRST, LAST = 10, 36


class Breathing(Dynamism):
    name = "breathing"

    def act(self, step, layers):
        frozen = tuple(range(layers.count * 3 // 4))
        if step == FIRST:
            layers.freeze(frozen)
            return Change(frozen, f"froze layers 0 to {frozen[-1]}")
        if step == LAST:
            layers.unfreeze(frozen)
            return Change(frozen, f"layers 0 to {frozen[-1]} train again")
        return None

    def acts(self, step):
        return step in (FIRST, LAST)

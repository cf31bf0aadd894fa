"""A case that lets all layers train for a step now and then, if they freeze by schedule."""

from dynmo.pipeline.case import Change, Dynamism

EVERY = 5


class Thawing(Dynamism):
    name = "thawing"

    def act(self, step, layers):
        frozen = tuple(sorted(layers.frozen))
        if not frozen or step % EVERY != 3:
            return None
        layers.unfreeze(frozen)
        return Change(frozen, f"layers {frozen[0]} to {frozen[-1]} train again")

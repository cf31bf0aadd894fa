"""LayerDrop (Fan et al., 2019): every 5 steps another quarter of the half blocks does not train."""

import random

from dynmo import Change, Dynamism, Forecast

EVERY, SHARE, SEED = 5, 0.25, 0


class LayerDrop(Dynamism):
    name = "layer_drop"

    def __init__(self):
        self.dropped, self.count = frozenset(), 0

    def draw(self, step):  # of the step alone: every rank draws the same
        inner = range(1, self.count - 1)  # neither embedding nor head
        return frozenset(random.Random(SEED + step // EVERY).sample(inner, int(SHARE * len(inner))))

    def act(self, step, layers):
        before, self.count = self.dropped, layers.count
        self.dropped = self.draw(step)
        for i in layers.own:  # at every step: a layer may have come from another rank since
            module = layers.modules[i]
            if i in self.dropped:
                module.forward = lambda x, m=module: x if m.training else type(m).forward(m, x)
            else:
                module.__dict__.pop("forward", None)
        changed = tuple(sorted(self.dropped ^ before))
        return Change(changed, f"leaves out layers {sorted(self.dropped)}") if changed else None

    def forecast(self, step):
        turn = step - step % EVERY + EVERY
        return [Forecast(turn, tuple(sorted(self.draw(turn) - self.dropped)), f=0.0, b=0.0, w=0.0)]

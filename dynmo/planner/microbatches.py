"""The same layers and the same global batch in microbatches of another size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile


def resize(
    profile: Profile, microbatches: int, factors: Iterable[float]
) -> Iterator[tuple[int, Profile]]:
    """Yields the profile for other numbers of microbatches of the same batch."""
    size = profile.microbatch
    for factor in factors:
        count = round(microbatches * factor)
        if (
            count < 1
            or count != microbatches * factor
            or (size is not None and size * microbatches % count)
        ):
            continue
        resized_to = None if size is None else size * microbatches // count
        layers = scale_layers(profile.layers, microbatches / count)
        yield count, replace(profile, layers=layers, microbatch=resized_to, microbatches=count)


def scale_layers(layers: Iterable[LayerCost], share: float) -> tuple[LayerCost, ...]:
    """The costs of a microbatch of `share` times the size.

    Seconds, activations and messages are in proportion. Real kernels do less well on small
    microbatches, so a measurement at that size is better.
    """
    return tuple(
        replace(
            x,
            f=x.f * share,
            b=x.b * share,
            w=x.w * share,
            activation_bytes=math.ceil(x.activation_bytes * share),
            stash_bytes=math.ceil(x.stash_bytes * share),
            output_bytes=math.ceil(x.output_bytes * share),
            workspace_bytes=math.ceil(x.workspace_bytes * share),
            forward_workspace_bytes=math.ceil(x.forward_workspace_bytes * share),
            weight_workspace_bytes=math.ceil(x.weight_workspace_bytes * share),
        )
        for x in layers
    )

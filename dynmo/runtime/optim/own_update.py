"""dynmo's own AdamW and SGD, which are torch's fused functions, and their inverse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from dynmo.runtime.optim.parameter_groups import LayerGroups, OptimizerSettings, Rates

State = dict[str, dict[str, Any]]
"""State of each parameter that has been stepped, by moment."""


class OwnUpdate:
    """AdamW or SGD over the parameters of one layer.

    Args:
        matrices: Names of the parameters on which weight decay acts.
    """

    def __init__(
        self, settings: OptimizerSettings, groups: LayerGroups, matrices: Collection[str]
    ) -> None:
        self._settings, self._groups, self._matrices = settings, groups, matrices

    def moments(self, name: str, dims: int) -> tuple[str, ...]:
        """Returns the names that the state of a parameter may have."""
        return self._settings.state_names

    def is_cut(self, name: str, moment: str, dims: int) -> bool:
        """Returns whether a moment has an element for each of the parameter's."""
        return moment != "step"

    def on_cpu(self, name: str, moment: str, dims: int) -> bool:
        return False

    def state_bytes(self, name: str, shape: Sequence[int], element: int) -> int:
        """Returns the bytes of the state of a parameter, but for its numbers."""
        return self._settings.moments * torch.Size(shape).numel() * element

    def _options(self, name: str, rates: Rates) -> tuple[int, dict[str, Any]]:
        """Returns the number of a parameter's group, and its options."""
        number = self._groups.of.get(name, 0)
        options = self._settings.options
        if isinstance(rates, Sequence):
            options |= {key: rates[number][key] for key in options}
        else:
            options |= self._groups.groups[number].given | {"lr": rates}
        if name not in self._matrices and "weight_decay" not in self._groups.group(name).given:
            options["weight_decay"] = 0.0
        return number, options

    def step(
        self,
        pieces: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: State,
        rates: Rates,
    ) -> None:
        for names, options in self._alike(gradients, state, rates):
            self._apply(
                names,
                [pieces[name] for name in names],
                [gradients[name] for name in names],
                state,
                options,
            )

    def _alike(
        self, names: Collection[str], state: State, rates: Rates
    ) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yields parameters that one call of torch's function takes, and their options."""
        alike: dict[tuple[Any, ...], tuple[list[str], dict[str, Any]]] = {}
        for name in names:
            number, options = self._options(name, rates)
            # torch starts the momentum of all parameters that it is given, or of none.
            key = (number, options["weight_decay"], name in state)
            alike.setdefault(key, ([], options))[0].append(name)
        yield from alike.values()

    def _apply(
        self,
        names: Sequence[str],
        pieces: list[Tensor],
        gradients: list[Tensor],
        state: State,
        options: Mapping[str, Any],
    ) -> None:
        """Applies torch's functions. Its optimizer classes take seconds to import."""
        common: dict[str, Any] = {
            "fused": True,
            "lr": float(options["lr"]),
            "weight_decay": options["weight_decay"],
            "maximize": False,
        }
        with torch.no_grad():
            if self._settings.name == "sgd":
                # Without momentum, the buffers of an earlier run with momentum are dropped.
                momentum = options["momentum"]
                buffers = [
                    state.get(name, {}).get("momentum_buffer") if momentum else None
                    for name in names
                ]
                sgd(
                    pieces,
                    gradients,
                    buffers,
                    momentum=momentum,
                    dampening=0.0,
                    nesterov=False,
                    **common,
                )
                for name, buffer in zip(names, buffers, strict=True):
                    state[name] = {} if buffer is None else {"momentum_buffer": buffer}
                return
            for name, piece in zip(names, pieces, strict=True):
                if name not in state:
                    moments = {
                        moment: torch.zeros_like(piece, requires_grad=False)
                        for moment in ("exp_avg", "exp_avg_sq")
                    }
                    state[name] = {"step": torch.zeros((), device=piece.device)} | moments
            steps, first, second = (
                [state[name][moment] for name in names] for moment in self._settings.state_names
            )
            b1, b2 = options["betas"]
            adamw(
                pieces,
                gradients,
                first,
                second,
                [],
                steps,
                amsgrad=False,
                beta1=b1,
                beta2=b2,
                eps=options["eps"],
                **common,
            )

    def forget(self) -> None:
        """Nothing is kept beside the state."""

    def invert(
        self, name: str, piece: Tensor, g: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        """Takes back the last step of one parameter by arithmetic.

        It does not give the same bits. A moment whose b is 0 has no past, and becomes 0.

            AdamW  u = lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
                   p = (p + u) / (1 - lr wd)
                   v = (v - (1 - b2) g^2) / b2;  m = (m - (1 - b1) g) / b1;  t = t - 1
            SGD    p = p + lr b;  b = (b - g - wd p) / momentum
        """
        _, options = self._options(name, rates)
        lr, decay = float(options["lr"]), options["weight_decay"]
        if self._settings.name == "sgd":
            buffer = state.get("momentum_buffer")
            if buffer is None:  # no momentum: the step was lr * (g + wd p)
                piece.add_(g, alpha=lr).div_(1 - lr * decay)
                return
            piece.add_(buffer, alpha=lr)
            buffer.sub_(g).sub_(piece, alpha=decay).div_(options["momentum"])
            return
        first, second, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
        b1, b2 = options["betas"]
        count = float(t)
        root = (second / (1 - b2**count)).sqrt_().add_(options["eps"])
        piece.addcdiv_(first, root, value=lr / (1 - b1**count)).div_(1 - lr * decay)
        # Rounding may leave a negative square.
        if b2:
            second.addcmul_(g, g, value=b2 - 1).div_(b2).clamp_(min=0)
        else:
            second.zero_()
        if b1:
            first.sub_(g, alpha=1 - b1).div_(b1)
        else:
            first.zero_()
        t.sub_(1)

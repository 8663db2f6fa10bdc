"""LARS and LAMB: each layer's step is scaled by the ratio of its weight's norm to its update's, for very large batches.

Both decide on the device whether a step happens (`found_inf`, set by loss scaling), as torch's fused optimizers do.
LARS: You et al. 2017, arXiv:1708.03888. LAMB: You et al. 2020, arXiv:1904.00962.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class _Layerwise(torch.optim.Optimizer):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # alive is 0 for a step that must not happen: then the state stays and the update is nothing.
                alive = _everywhere(torch.ones((), device=parameter.device, dtype=parameter.dtype), parameter)
                gradient = parameter.grad
                if found_inf is not None:
                    alive = alive - _everywhere(found_inf.to(parameter.device, parameter.dtype), parameter)
                    gradient = torch.where(alive > 0, gradient, torch.zeros_like(gradient))
                self._update(parameter, gradient, alive, group, self.state[parameter])
        return None

    def _update(
        self, parameter: Tensor, gradient: Tensor, alive: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        raise AssertionError("a child defines this")


class Lamb(_Layerwise):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        beta1, beta2 = betas
        _require("betas", betas, 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 to below 1")
        _require("eps", eps, eps >= 0, "0 or more")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(
        self, parameter: Tensor, gradient: Tensor, alive: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = _everywhere(torch.zeros((), device=parameter.device), parameter)
            state["mean"] = torch.zeros_like(parameter)
            state["variance"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += alive
        state["mean"].lerp_(gradient, (1 - beta1) * alive)
        state["variance"].lerp_(gradient * gradient, (1 - beta2) * alive)
        steps = state["step"].double().clamp(min=1)  # 1 - 0.999 has only four digits in fp32
        mean = state["mean"] / (1 - beta1**steps)
        variance = state["variance"] / (1 - beta2**steps)
        update = mean / (variance.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        parameter.sub_(update * (group["lr"] * _trust(parameter, update) * alive))


class Lars(_Layerwise):
    """Momentum SGD with layer-wise rates. Norms and biases (vectors) take plain steps, as in the paper's practice."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        trust: float = 1e-3,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _require("momentum", momentum, 0 <= momentum < 1, "from 0 to below 1")
        _require("trust", trust, trust > 0, "more than 0")
        _require("eps", eps, eps >= 0, "0 or more")
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "trust": trust, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(
        self, parameter: Tensor, gradient: Tensor, alive: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        decayed = gradient + group["weight_decay"] * parameter
        rate = group["lr"]
        if parameter.ndim >= 2:
            weight_norm = parameter.norm()
            bound = gradient.norm() + group["weight_decay"] * weight_norm + group["eps"]
            rate = rate * torch.where(weight_norm > 0, group["trust"] * weight_norm / bound, 1.0)
        moved = state["momentum"] * group["momentum"] + decayed * rate
        state["momentum"].lerp_(moved, alive)
        parameter.sub_(state["momentum"] * alive)


def _everywhere(value: Tensor, like: Tensor) -> Tensor:
    """A number that all ranks have, as a tensor beside a parameter: a DTensor takes no plain ones."""
    if not isinstance(like, DTensor):
        return value
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _require(name: str, found: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name}: found {found}, allowed: {allowed}")


def _trust(parameter: Tensor, update: Tensor) -> Tensor:
    weight_norm, update_norm = parameter.norm(), update.norm()
    known = (weight_norm > 0) & (update_norm > 0)
    return torch.where(known, weight_norm / update_norm.clamp(min=1e-30), 1.0)

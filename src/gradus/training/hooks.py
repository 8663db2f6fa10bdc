"""Hooks: code of the user's own at the few moments of a run where it is wanted.

    class Notify(gradus.Hook):
        def on_evaluate(self, run, results):
            print(run.step, results["loss"])

In the recipe: `hooks: [notify.py:Notify]`, or `{use: notify.py:Notify, key: value}` with what its constructor takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.checkpoint.reading import read_tensor
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.schema.callables import import_callable, is_import_path, short_name
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import Named
from gradus.schema.user_code import user_code

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


class Hook:
    """A class to derive from. What is not overridden does nothing.

    Rank 0 calls, unless `every_rank` is true: then all ranks do, and in the same order, so that they may talk to each
    other. Nothing that is read from the device here is free: `run.loss` is, because it is one step old.
    """

    every_rank = False

    def on_start(self, run: HookRun) -> None:
        """Before the first step of this attempt; `run.step` is above 0 when the run goes on from a checkpoint."""

    def on_step(self, run: HookRun) -> None:
        """After an optimizer step was launched; `run.step` counts it."""

    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        """After an evaluation."""

    def on_checkpoint(self, run: HookRun, path: Path) -> None:
        """After a checkpoint was written and verified, which is some steps after the one that it is of."""

    def on_end(self, run: HookRun, state: str, reason: str) -> None:
        """The run is `finished` or `stopped`; not called when it fails."""

    def state(self) -> Mapping[str, Tensor | float]:
        """Tensors and numbers to be kept in checkpoints, taken from rank 0."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Before `on_start`: what `state` returned when the checkpoint was made, numbers as tensors of one element."""

    def _restore_stored(self, state: Mapping[str, StoredTensor]) -> None:
        """The same without the tensors in memory, for what is divided over ranks."""
        self.restore({key: read_tensor(stored) for key, stored in state.items()})


class HookRun:
    """What a hook sees of the run."""

    def __init__(self, live: LiveRun, every_rank: bool) -> None:
        self._live = live
        self._every_rank = every_rank

    @property
    def model(self) -> nn.Module:
        """The model itself, without the wrappers of parallelism."""
        return self._live.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._live.optimizer

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._live.state.step

    @property
    def total_steps(self) -> int:
        return self._live.total_steps

    @property
    def loss(self) -> float | None:
        """The last training loss that has arrived on the host: that of the step before the last."""
        return self._live.last_loss

    @property
    def rank(self) -> int:
        return self._live.world.rank

    @property
    def ranks(self) -> int:
        return self._live.world.size

    @property
    def directory(self) -> Path:
        return self._live.run.path

    def log(self, **numbers: float) -> None:
        """Numbers of the user's own, written into this step's row of the metrics."""
        self._live.recorder.log(self.step, numbers)

    def evaluate_with(self, weights: Mapping[str, Tensor], name: str) -> dict[str, float] | None:
        """Evaluate with other weights, by parameter name, and log the results under `name`. For hooks of every rank."""
        if not self._every_rank and self.ranks > 1:
            raise InputError(
                "hooks: evaluate_with needs all ranks, but this hook is called on rank 0 only",
                hint="set `every_rank = True` in its class",
                field="hooks",
            )
        if self._live.evaluator is None:  # an own loop evaluates by itself
            return None
        parameters = dict(self.model.named_parameters())
        own = {key: parameters[key].detach().clone() for key in weights}
        with torch.no_grad():
            for key, value in weights.items():
                parameters[key].copy_(value)
        try:
            results = self._live.measure()
        finally:
            with torch.no_grad():
                for key, value in own.items():
                    parameters[key].copy_(value)
        if results is not None:
            self._live.recorder.log(self.step, {f"validation_{name}_{key}": value for key, value in results.items()})
        return results


class Hooks:
    """The recipe's hooks on this rank. An error in one is told as the user's own."""

    def __init__(self, live: LiveRun, blocks: Sequence[Named]) -> None:
        named = [(block.use, _built(block)) for block in blocks]
        self._hooks = [(use, hook) for use, hook in named if hook.every_rank or live.world.leads]
        self._views = [HookRun(live, hook.every_rank) for _, hook in self._hooks]

    def on_start(self) -> None:
        self._call("on_start")
        self.tensors()  # what cannot be kept is told now, and not at the first checkpoint

    def on_step(self) -> None:
        self._call("on_step")

    def on_evaluate(self, results: dict[str, float]) -> None:
        self._call("on_evaluate", results)

    def on_checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def on_end(self, state: str, reason: str) -> None:
        self._call("on_end", state, reason)

    def _call(self, moment: str, *arguments: Any) -> None:
        for (use, hook), view in zip(self._hooks, self._views, strict=True):
            with user_code("hooks", f"{use}, in {moment},"):
                getattr(hook, moment)(view, *arguments)

    def tensors(self) -> dict[str, Tensor]:
        """What hooks want kept, by names that say whose it is."""
        kept: dict[str, Tensor] = {}
        for use, hook in self._hooks:
            with user_code("hooks", f"{use}, in state,"):
                state = hook.state()
            for key, value in state.items():
                kept[f"hooks.{short_name(use)}.{key}"] = _kept(use, key, value, hook.every_rank)
        return kept

    def of_rank_0(self, names: Iterable[str]) -> frozenset[str]:
        """Which of these are kept for hooks that rank 0 alone has."""
        prefixes = tuple(f"hooks.{short_name(use)}." for use, hook in self._hooks if not hook.every_rank)
        return frozenset(name for name in names if name.startswith(prefixes))

    def restore(self, tensors: Mapping[str, StoredTensor]) -> None:
        for use, hook in self._hooks:
            prefix = f"hooks.{short_name(use)}."
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if state:
                with user_code("hooks", f"{use}, in restore,"):
                    hook._restore_stored(state)


def _kept(use: str, key: str, value: Any, every_rank: bool) -> Tensor:
    if isinstance(value, DTensor) and not every_rank:
        raise InputError(
            f"hooks: {use}: its state {key!r} is divided over ranks, but rank 0 alone calls this hook",
            hint="set `every_rank = True` in its class",
            field="hooks",
        )
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    raise InputError(
        f"hooks: {use}: its state {key!r} is a {type(value).__name__}, which a checkpoint cannot hold; allowed: "
        "tensors and numbers",
        field="hooks",
        found=type(value).__name__,
    )


def _built(block: Named) -> Hook:
    if not is_import_path(block.use):
        from gradus.training.ema import Ema

        return Ema(**block.options)
    with user_code("hooks", block.use):
        made = import_callable(block.use, "hooks")(**block.options)
    if not isinstance(made, Hook):
        raise InputError(
            f"hooks: {block.use} returned {type(made).__name__}, allowed: an object of a class derived from "
            "gradus.Hook",
            hint=f"write `class {short_name(block.use)}(gradus.Hook):` and override what you need",
            field="hooks",
            found=block.use,
        )
    _check_moments(block.use, type(made))
    return made


def _check_moments(use: str, kind: type[Hook]) -> None:
    """A method that looks like a moment and is none would never be called."""
    moments = [name for name in vars(Hook) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in moments:
            raise unknown_name(f"moment of {use}:", name, moments, field="hooks", hint="other methods: without `on_`")

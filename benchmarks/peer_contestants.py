"""The contestants: each prepares a work and runs segments of its steps.

Peers are made as somebody would who knows them: the whole model compiled, a fused optimizer, nothing logged, nothing
that waits for the device. gradus is made from the recipe alone, with the plan that `gradus train` would choose.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peer_samples import CUDA, DEVICE, MeanLoss, samples_of
from peer_works import Work
from torch import Tensor, nn

import gradus
from gradus.hardware.cluster import detect_cluster
from gradus.launcher.recipe_run import chosen
from gradus.parallel.world import alone
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.plan import Plan
from gradus.schema.recipe import OptimizerBlock, Recipe
from gradus.training.building import open_data
from gradus.training.graphed_step import GraphedStep
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.schedules import learning_rate


@dataclass(frozen=True)
class Segment:
    seconds: float  # of its steps, without those that lead in
    losses: dict[int, float]  # by step, from 1; those that lead in as well


class Contestant(ABC):
    """One way to train. `note` says what it chose by itself."""

    package: str | None = None  # that must be installed
    note = ""
    shows_peak = True  # not while it launches recorded graphs, whose memory torch does not count as in use

    @classmethod
    def is_installed(cls) -> bool:
        return cls.package is None or importlib.util.find_spec(cls.package) is not None

    @abstractmethod
    def prepare(self, work: Work, folder: Path) -> None:
        """Build everything, up to the first step."""

    @abstractmethod
    def segment(self, steps: int, lead: int = 0) -> Segment:
        """Train on: `lead` steps that do not count, then `steps` that do, all done when it returns."""

    def close(self) -> None:
        """Let go of all memory."""
        self.__dict__.clear()


class Raw(Contestant):
    """A loop written by hand."""

    def prepare(self, work: Work, folder: Path) -> None:
        recipe = resolved(Recipe.from_document(_for_peers(work)))
        self.work, self.block, self.done = work, recipe.optimizer, 0
        self.samples = samples_of(work, recipe)
        self.rate = learning_rate(recipe.optimizer, recipe.batch, recipe.steps or 0)
        model: nn.Module = MeanLoss(recipe)
        if work.channels_last and CUDA:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.optimizer = self.wrapped(model, fused_optimizer(model, recipe.optimizer))

    @property
    def mixed(self) -> bool:
        """Whether it computes in bf16; on a CPU nobody does, gradus neither."""
        return CUDA and not self.work.plain

    def wrapped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return self.compiled(model), optimizer

    def compiled(self, model: nn.Module) -> Any:
        return torch.compile(model) if self.mixed else model

    def computing(self) -> AbstractContextManager[object]:
        return torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.mixed)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def segment(self, steps: int, lead: int = 0) -> Segment:
        first, batches = self.done, self.samples(self.done, lead + steps)
        losses = self._steps(itertools.islice(batches, lead))
        synchronize()
        began = time.perf_counter()
        losses += self._steps(batches)
        synchronize()
        seconds = time.perf_counter() - began
        return Segment(seconds, {first + number: float(loss) for number, loss in enumerate(losses, start=1)})

    def _steps(self, batches: Iterator[tuple[Tensor, ...]]) -> list[Tensor]:
        return [self._step(*batch) for batch in batches]

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.done)
        with self.computing():
            loss = self.model(inputs, targets)
        self.backward(loss)
        if self.block.clip:
            self.clip(self.block.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()


class Fabric(Raw):
    """Lightning Fabric."""

    package = "lightning"

    def wrapped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        from lightning.fabric import Fabric as LightningFabric

        precision = "bf16-mixed" if self.mixed else "32-true"
        self.fabric = LightningFabric(accelerator=DEVICE.type, devices=1, precision=precision)
        return self.fabric.setup(self.compiled(model), optimizer)  # type: ignore[no-any-return]

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()  # the wrapped model does it

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, norm: float) -> None:
        # Its default looks whether the norm is a number, for which the host waits in every step.
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm, error_if_nonfinite=False)


class Accelerate(Raw):
    """Hugging Face Accelerate, which compiles the model when it prepares it."""

    package = "accelerate"

    def wrapped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # another work may have had another precision
        precision, backend = ("bf16", "inductor") if self.mixed else ("no", "no")
        self.accelerator = Accelerator(mixed_precision=precision, dynamo_backend=backend)
        return self.accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()  # the prepared model does it

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, norm: float) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), norm)


class Gradus(Contestant):
    """What `gradus train` does on one rank: global order, metrics, events and status included."""

    keys: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # what its user writes into the recipe, besides the work's own

    def prepare(self, work: Work, folder: Path) -> None:
        document = work.document()
        written = {block: {**document[block], **keys} for block, keys in self.keys.items()}
        recipe = resolved(Recipe.from_document({**document, **written}))
        plan = chosen(recipe, detect_cluster(), 1).plan
        self.shows_peak = not plan.cuda_graph
        self.note = _noted(plan)
        self.run = RunDirectory.create(folder, work.key)
        self.live = live = LiveRun.from_recipe(recipe, plan, self.run, 1, alone(DEVICE))
        live.evaluator = None
        # A segment ends, and the run does not: nothing is saved, and nothing closed.
        live.saving.complete = lambda check_weights: check_weights()  # type: ignore[method-assign]
        self.really_close = live.saving.close
        live.saving.close = lambda finished=False: None  # type: ignore[method-assign]

    def segment(self, steps: int, lead: int = 0) -> Segment:
        live = self.live
        begun = live.state.step
        live.total_steps = begun + lead + steps
        train(live)
        if isinstance(live.step, GraphedStep) and not live.step.is_recorded and "no graph" not in self.note:
            self.note += ", no graph could be recorded"
        return _logged(self.run, begun, lead, steps)

    def close(self) -> None:
        if "live" in self.__dict__:
            self.really_close(finished=True)
            self.live.recorder.close(state="finished")
        super().close()


class GradusLean(Gradus):
    """With one key that saves memory: what is cheap to compute is computed again for backward."""

    keys = {"plan": {"recompute": "selective"}}  # noqa: RUF012


class GradusLeanMoments(Gradus):
    """With a second key: the optimizer's moments in 16 bits."""

    keys = {**GradusLean.keys, "optimizer": {"moments": "bf16"}}  # noqa: RUF012


class GradusLoop(Contestant):
    """A loop of one's own, with gradus's verbs: no model and no data in the recipe, no key in its plan."""

    def prepare(self, work: Work, folder: Path) -> None:
        document = work.document()
        recipe = resolved(Recipe.from_document(document))
        data = open_data(recipe, "train")
        assert data is not None
        kept = ("name", "steps", "log_every", "seed", "batch", "optimizer", "plan")
        self.run = gradus.Run.start({name: document[name] for name in kept}, runs=folder)
        self.model, _ = self.run.prepare(MeanLoss(recipe))
        self.note = _noted(self.run._live.plan)
        self.batches = self.run.batches(data.dataset)
        self.directory = RunDirectory(self.run.directory)

    def segment(self, steps: int, lead: int = 0) -> Segment:
        begun = self.run.steps_done
        self.run._live.recorder.restart_clock()  # others may have had their turn
        for _ in range(lead + steps):
            batch = next(self.batches)
            inputs, targets = batch.values() if isinstance(batch, dict) else batch
            self.run.step(self.model(inputs, targets))
        boundary = self.run._boundary
        assert boundary is not None
        boundary.settle()
        return _logged(self.directory, begun, lead, steps)

    def close(self) -> None:
        if "run" in self.__dict__:
            live = self.run._live
            live.saving.complete = lambda check_weights: check_weights()  # type: ignore[method-assign]
            self.run.finish()
        super().close()


SHOWN_OF_A_PLAN = (
    *("precision", "narrow_weights", "loss_chunks", "cuda_graph", "compile", "channels_last"),
    *("micro_batch", "accumulate", "recompute", "workers"),
)
CONTESTANTS: dict[str, type[Contestant]] = {
    "raw": Raw,
    "fabric": Fabric,
    "accelerate": Accelerate,
    "gradus": Gradus,
    "gradus-lean": GradusLean,
    "gradus-lean-moments": GradusLeanMoments,
    "gradus-loop": GradusLoop,
}


def _noted(plan: Plan) -> str:
    return ", ".join(f"{key} {value}" for key, value in plan.model_dump().items() if key in SHOWN_OF_A_PLAN)


def _logged(run: RunDirectory, begun: int, lead: int, steps: int) -> Segment:
    """From a run's own metrics."""
    rows = [row for row in read_metrics(run) if row["step"] > begun and "step_seconds" in row]  # else it is an epoch's
    counted = [row["step_seconds"] for row in rows if row["step"] > begun + lead]
    seconds = sum(counted) / len(counted) * steps  # every row is a mean over equally many steps
    return Segment(seconds, {row["step"]: row["loss"] for row in rows if row["loss"] is not None})


def _for_peers(work: Work) -> dict[str, Any]:
    """The work's recipe without what is gradus's own."""
    document = work.document()
    document["data"] = {key: value for key, value in document["data"].items() if key != "augment"}
    return {**document, "plan": {}}


def fused_optimizer(model: nn.Module, block: OptimizerBlock) -> torch.optim.Optimizer:
    """The recipe's optimizer, built here: what gradus makes of it must not change the peers."""
    trained = list(model.parameters())
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": block.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[block.use]
    return kind(groups, lr=block.lr, fused=True, **block.options)  # type: ignore[no-any-return]


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()

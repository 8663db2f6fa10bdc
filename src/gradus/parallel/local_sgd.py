"""local SGD: replicas take several steps alone, each on its own samples, and are then averaged.

Ranks talk every k-th step instead of every step. What they then average is all that a step changes: parameters, the
optimizer's state and batch statistics. So after a meeting there is one model with one optimizer, the same on every
rank, which a checkpoint can hold: a run that goes on from it is the run that was never stopped. Averaging moments as
well as weights costs more bytes (three times as many with Adam), but only every k-th step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradus.parallel.averaging import average_
from gradus.parallel.batch_norm import STATISTICS
from gradus.parallel.replicate import broadcast
from gradus.parallel.world import World
from gradus.schema.errors import DoNotRestart, InputError

_EQUAL_EVERYWHERE = "step"  # of an optimizer's state: the number of steps, which all ranks take


class LocalSGD:
    """Replicas that meet every so many steps, and whenever somebody wants the one model that they stand for."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, every: int, bucket_mib: int
    ) -> None:
        """All ranks start with the parameters and buffers of rank 0."""
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._every = every
        self._bucket_mib = bucket_mib
        self._steps_alone = 0
        broadcast([*model.parameters(), *model.buffers()], None)

    def stepped(self) -> None:
        """The replicas have taken a step. They meet if it was the last of those that they take alone."""
        self._steps_alone += 1
        if self._steps_alone == self._every:
            self.meet()

    def meet(self) -> None:
        """Make one model of the replicas, unless they are one. All ranks must call it."""
        if self._steps_alone == 0:
            return
        self._check_same_state()
        average_(self._changing(), None, self._bucket_mib)
        self._steps_alone = 0

    def sum_over_ranks(self, values: Tensor) -> dist.Work | None:
        """Begin to sum numbers of a step over all ranks, in place. Nobody waits: ranks are steps apart."""
        work: dist.Work | None = dist.all_reduce(values, async_op=True)
        return work

    def _changing(self) -> Iterator[Tensor]:
        """Everything that differs between replicas after a step, in the same order on each."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        yield from (p.detach() for p in parameters)
        for parameter in parameters:
            for name, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.is_floating_point() and name != _EQUAL_EVERYWHERE:
                    yield value
        for module in self._model.modules():
            if isinstance(module, _BatchNorm):
                for name, buffer in module.named_buffers(recurse=False):
                    if name in STATISTICS and buffer.is_floating_point():
                        yield buffer

    def _check_same_state(self) -> None:
        """Ranks whose samples use other parts of the model would wait for each other for ever."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        here = torch.tensor([bool(self._optimizer.state.get(p)) for p in parameters], dtype=torch.int32)
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        ranks = self._world.sum_(here).tolist()
        some = [name for name, count in zip(names, ranks, strict=True) if 0 < count < self._world.size]
        if some:
            raise DoNotRestart(
                f"plan.synchronise_every: {some[0]} ({len(some)} of {len(names)} parameters) was trained on some ranks "
                "only, so that there is no state of the optimizer to average",
                hint="use plan.synchronise_every=1: the model uses other parts of itself for other samples",
                field="plan.synchronise_every",
            )


def check_can_step_alone(model: nn.Module, every: int, *, some_rank_may_pad: bool) -> None:
    """Refuse a model with batch statistics where a rank may have a step without samples: it would add nonsense."""
    if some_rank_may_pad and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise InputError(
            f"plan.synchronise_every: found {every}, but the model has batch normalisation, and in the last step of "
            "the budget some rank has no sample to take statistics of",
            hint="give the budget in steps, or use plan.synchronise_every=1",
            field="plan.synchronise_every",
            found=every,
            allowed=1,
        )

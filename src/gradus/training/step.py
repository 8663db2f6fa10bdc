"""One optimizer step: micro-batches in, gradients normalised over the global batch, clipped, applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradus.data.loader import MicroBatch
from gradus.faults.own_time import OwnTime
from gradus.parallel.batch_norm import muted_batch_norm
from gradus.parallel.expert import ExpertLoads
from gradus.parallel.local_sgd import LocalSGD
from gradus.parallel.replicate import check_every_parameter_is_used, explain_ddp_error, reducing_gradients
from gradus.parallel.shard import reduce_gradients
from gradus.parallel.tensor import part_of_sequence
from gradus.parallel.world import World
from gradus.training.accumulation import WideGradients
from gradus.training.gradients import clip, local, scale, settle_gradients, total_norm
from gradus.training.guard import Guard
from gradus.training.loss_scaling import LossScale, step_unless
from gradus.training.narrow_weights import NarrowWeights
from gradus.training.objective import Objective
from gradus.training.optimizers import LR_FACTOR
from gradus.training.precision import Numbers
from gradus.training.randomness import seed_for_micro_batch
from gradus.training.readback import PendingNumbers, Readback, Summing


class TrainingStep:
    """Everything that a step needs and that stays the same from step to step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective | None,  # None where an own loop computes the loss
        numbers: Numbers,
        world: World,
        *,
        accumulate: int,
        clip: float | None,
        seed: int,
        zero: int = 0,
        accumulate_in_fp32: bool = True,
        local_sgd: LocalSGD | None = None,  # then `world` is this rank alone
        on_nan: str = "stop",
        narrow_weights: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scale = LossScale(world.device) if numbers.scales_loss else None
        self._objective = objective
        self._numbers = numbers
        self._world = world
        self.accumulate = accumulate
        self._clip = clip
        self._seed = seed
        self._part = part_of_sequence(model, world)
        self._zero = zero
        self._local_sgd = local_sgd
        self._readback = Readback(world.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sharded = isinstance(model, FSDPModule)  # which adds gradients up in the format that it reduces them in
        wide = accumulate > 1 and accumulate_in_fp32 and not self._sharded
        self._wide = WideGradients(self._parameters) if wide else None
        if self._wide is not None and not self._wide.needed:
            self._wide = None
        self._narrow = NarrowWeights(model, numbers.autocast) if narrow_weights and numbers.autocast else None
        self._experts = ExpertLoads(model, world)
        self._guard = Guard(model, world, skips=on_nan == "skip") if on_nan != "stop" else None
        self._uncounted: frozenset[Tensor] = frozenset()  # parameters that another pipeline stage has as well
        self._reduces_as_last: bool | None = None  # what FSDP2 was told to do with gradients
        self.own: OwnTime | None = None  # what this rank does by itself is timed there
        self._losses: list[Tensor] = []  # of the micro-batches of the present step
        self._counts: list[Tensor] = []

    def run(self, micro_batches: Iterator[MicroBatch], step: int, lr: float, measure_norm: bool) -> PendingNumbers:
        """Step number `step` (from 0). No line in here makes the host wait for the device."""
        self._accumulated(micro_batches, step)
        return self.apply(lr, measure_norm)

    def _accumulated(self, micro_batches: Iterator[MicroBatch], step: int) -> None:
        for _ in range(self.accumulate):
            micro = next(micro_batches)
            assert self._objective is not None
            with self.forward(micro, step):
                losses = self._objective(self.model, micro.inputs, micro.samples)
            self.backward(losses.loss_sum, losses.count)

    @contextmanager
    def forward(self, micro: MicroBatch, step: int) -> Iterator[None]:
        """Inside, the model and its loss are computed for a micro-batch; then `backward` takes the loss."""
        seed_for_micro_batch(self._seed, step, micro.position, self._world.device, *self._part)
        if self._guard is not None and not self.under_way:
            self._guard.begin()
        if self._narrow is not None:
            if not self.under_way:
                self._narrow.refresh()
            self._narrow.put_in()
        padding = micro.samples == 0
        last = len(self._counts) == self.accumulate - 1
        self._reducing = ExitStack()  # until backward is done
        if self._sharded:
            if last is not self._reduces_as_last:  # each telling walks over all modules
                reduce_gradients(self.model, self._zero, last=last)
                self._reduces_as_last = last
        else:
            self._reducing.enter_context(reducing_gradients(self.model, reduce=last and self._wide is None))
        try:
            computing = self._numbers.computing(self._world.device)
            with muted_batch_norm(self.model, padding), self._experts.counting(micro.samples), computing:
                yield
        except RuntimeError as error:
            explained = explain_ddp_error(error, self.model)
            if explained is error:
                raise
            raise explained from error

    def abandon(self) -> None:
        """No backward will come for the last forward pass."""
        if self._narrow is not None:
            self._narrow.take_out()

    def backward(self, loss_sum: Tensor, count: Tensor) -> None:
        """Add the gradients of a micro-batch to those of the step.

        The mean is over all valid tokens or samples of the step, on all ranks. Their number is known only after the
        last forward pass, so gradients are first divided by what the first micro-batch lets expect, which keeps them in
        the range of fp16, and then corrected. Without accumulation that is already exact.
        """
        # What is added up over micro-batches and divided must not lose digits.
        exact = torch.float64 if self.accumulate > 1 else loss_sum.dtype
        self._losses.append(loss_sum.detach().to(exact))
        self._counts.append(count.to(exact) if self.accumulate > 1 else count)
        if len(self._counts) == 1:
            self._totals = self._over_ranks(self._losses[0], self._counts[0])
            self._expected = self._expected_share(self._totals[1])
        self._loss_dtype = loss_sum.dtype
        scaled = loss_sum / self._expected.to(loss_sum.dtype)
        if self.loss_scale is not None:
            scaled = scaled * self.loss_scale.scale
        with self._reducing, self.own.backward() if self.own is not None else nullcontext():
            scaled.backward()  # type: ignore[no-untyped-call]
        if self._narrow is not None:
            self._narrow.take_out()
            self._narrow.hand_over_gradients()
        if self._wide is not None:
            with self.own.inside("backward") if self.own is not None else nullcontext():
                self._wide.take()

    @property
    def complete(self) -> bool:
        """Whether all micro-batches of the step have been through `backward`."""
        return len(self._counts) == self.accumulate

    @property
    def under_way(self) -> bool:
        """Whether some, but not all, micro-batches of a step have been through `backward`."""
        return bool(self._counts)

    def apply(self, lr: float | None, measure_norm: bool) -> PendingNumbers:
        """Normalise, clip and apply the gradients of the step, and send its numbers on their way to the host.

        Without a learning rate, the optimizer's groups keep the ones they have.
        """
        if self.own is not None:
            self.own.where.enter("optimizer")
        loss_sum, count, correction = self._finished_sums()
        if self._wide is not None:
            self._wide.give(self._world)
        settle_gradients(self._parameters)
        trained = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if len(trained) < len(self._parameters) and self._world.size > 1:
            check_every_parameter_is_used(self.model)
        gradients = [local(gradient) for _, gradient in trained]
        if correction is not None:
            scale(gradients, correction)
        grad_norm, overflow, scale_before, scale_after = None, None, None, None
        if self.loss_scale is not None:
            scale(gradients, 1.0 / self.loss_scale.scale)
        if self._clip is not None or self.loss_scale is not None or measure_norm or self._guard is not None:
            grad_norm = total_norm(trained, self._world, uncounted=self._uncounted)
        not_finite = None
        if self._guard is not None:
            not_finite = self._guard.not_finite(loss_sum, count, grad_norm if self.loss_scale is None else None)
        if self._clip is not None and grad_norm is not None:
            clip(gradients, self._clip, grad_norm)
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get(LR_FACTOR, 1.0)
        if self.loss_scale is not None and grad_norm is not None:
            overflow = (~torch.isfinite(grad_norm)).float()
            scale_before = self.loss_scale.scale.clone()
            step_unless(self.optimizer, overflow if not_finite is None else torch.maximum(overflow, not_finite))
            self.loss_scale.update(overflow)
            scale_after = self.loss_scale.scale
        elif self._guard is not None and self._guard.skips and not_finite is not None:
            step_unless(self.optimizer, not_finite)
        else:
            self.optimizer.step()
        self._clear_gradients()
        experts = self._experts.settle()
        if self._guard is not None and not_finite is not None:
            self._guard.undo(not_finite)
        summing = None
        if self._local_sgd is not None:
            sums = torch.stack([loss_sum, count]).double()
            summing = Summing(sums, self._local_sgd.sum_over_ranks(sums))
            self._local_sgd.stepped()
        return self._readback.start(
            summing,
            loss_sum=loss_sum,
            count=count,
            grad_norm=grad_norm,
            overflow=overflow,
            scale_before=scale_before,
            scale_after=scale_after,
            not_finite=not_finite,
            **experts,
        )

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:  # not by the optimizer: an own one may hold only some of them
            parameter.grad = None

    def _finished_sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The step's global loss sum and count, and what its gradients must still be multiplied with."""
        losses, counts = self._losses, self._counts
        self._losses, self._counts = [], []
        if self.accumulate == 1:
            return (*self._totals, None)
        totals = self._over_ranks(torch.stack(losses).sum(), torch.stack(counts).sum())
        correction = self._expected * self._world.averaging_ranks / above_zero(totals[1], 1.0)
        return (*totals, correction.to(self._loss_dtype))

    def warm_up(self, micro_batches: Iterator[MicroBatch]) -> None:
        """A step whose result is thrown away.

        DDP orders its buckets by the first backward and regroups them at the second forward. A resumed run would
        therefore reduce its first step in another order than one that was never stopped; after this, both are past it.
        """
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self._accumulated(micro_batches, step=0)
        self._losses, self._counts = [], []
        if self._wide is not None:
            self._wide.forget()
        self._clear_gradients()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])

    def _over_ranks(self, loss_sum: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Both summed over all ranks, in one collective and in float64."""
        if self._world.size == 1:
            return loss_sum, count
        mine = torch.stack([loss_sum, count]).double()
        with self.own.waiting() if self.own is not None else nullcontext():
            sums = self._world.sum_(mine if self._world.counts_losses else torch.zeros_like(mine))
        return sums[0], sums[1]

    def _expected_share(self, count_of_first: Tensor) -> Tensor:
        """What a rank divides its losses by: the expected count of the step over the ranks that are averaged over."""
        share = self.accumulate / self._world.averaging_ranks
        return above_zero(count_of_first if share == 1 else count_of_first * share, share)


def above_zero(count: Tensor, otherwise: float) -> Tensor:
    """A count to divide by. Weights may add up to less than 1; where there is nothing at all, the sum is 0 as well."""
    return torch.where(count > 0, count, torch.full_like(count, otherwise))

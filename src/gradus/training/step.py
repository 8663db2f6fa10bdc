"""One optimizer step: micro-batches in, gradients normalised over the global batch, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

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
from gradus.training.gradients import clipping, local, scale, settle_gradients, total_norm
from gradus.training.guard import Guard
from gradus.training.loss_scaling import LossScale, step_unless
from gradus.training.narrow_weights import NarrowWeights, that_takes_narrow
from gradus.training.objective import Objective
from gradus.training.optimizers import LR_FACTOR
from gradus.training.precision import Numbers
from gradus.training.randomness import seed_for_micro_batch
from gradus.training.readback import PendingNumbers, Readback, Summing


class TrainingStep:
    """Everything that a step needs and that stays the same from step to step."""

    is_recording = False  # as graphs (graphed_step.py): nothing that is computed now is a step
    # Of the first loss with narrow weights, which the model may refuse (narrow_refusal.py).
    trial: Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]] | None = None
    on_wide_loss: Callable[[], None] | None = None  # an own loop's: of narrow weights, which no call of its model had

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
        others_write_weights: bool = True,  # hooks or an own loop may, where torch does not count it as a change
        narrow_in_calls: bool = False,  # an own loop's: weights are narrow inside its calls (narrow_calls.py) alone
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
        self._others_write_weights = others_write_weights
        self._narrow_in_calls = narrow_in_calls
        self._narrow_refused = False  # by the model: copies stay until the gradients that they may have are used
        self._computing = False  # between a micro-batch and its loss
        self._called_narrow = False  # since this micro-batch began
        self._refreshed = False  # since this step began
        self._experts = ExpertLoads(model, world)
        self._guard = Guard(model, world, skips=on_nan == "skip") if on_nan != "stop" else None
        whole_updates = accumulate == 1 and self.loss_scale is None and not (self._guard and self._guard.skips)
        self._one_pass = that_takes_narrow(optimizer, model) if self._narrow is not None and whole_updates else None
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._all_are_updated = updated.issuperset(self._parameters)  # not by an own optimizer of some of them
        self._unscaled = torch.ones((), device=world.device)
        self._uncounted: frozenset[Tensor] = frozenset()  # parameters that another pipeline stage has as well
        self._reduces_as_last: bool | None = None  # what FSDP2 was told to do with gradients
        self.own: OwnTime | None = None  # what this rank does by itself is timed there
        self._losses: list[Tensor] = []  # of the micro-batches of the present step
        self._counts: list[Tensor] = []

    def run(
        self, micro_batches: Iterator[MicroBatch], step: int, lr: float | None, measure_norm: bool
    ) -> PendingNumbers:
        """Step number `step` (from 0). No line in here makes the host wait for the device."""
        self._accumulated(micro_batches, step)
        return self.apply(lr, measure_norm)

    def _accumulated(self, micro_batches: Iterator[MicroBatch], step: int) -> None:
        for _ in range(self.accumulate):
            micro = next(micro_batches)
            with self.forward(micro, step):
                trial, self.trial = self.trial, None
                loss_sum, count = self._lost(micro) if trial is None else trial(partial(self._lost, micro))
            self.backward(loss_sum, count)

    def _lost(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        assert self._objective is not None
        losses = self._objective(self.model, micro.inputs, micro.samples)
        return losses.loss_sum, losses.count

    @contextmanager
    def forward(self, micro: MicroBatch, step: int) -> Iterator[None]:
        """Inside, the model and its loss are computed for a micro-batch; then `backward` takes the loss."""
        self._seed_for(micro, step)
        if self._guard is not None and not self.under_way:
            self._guard.begin()
        if not self.under_way:
            self._refreshed = False
        if self._narrow is not None and not self._narrow_in_calls:
            self._put_in_narrow(self._narrow)
        padding = micro.samples == 0
        last = len(self._counts) == self.accumulate - 1
        self._reducing = ExitStack()  # until backward is done
        if self._sharded:
            if last is not self._reduces_as_last:  # each telling walks over all modules
                reduce_gradients(self.model, self._zero, last=last)
                self._reduces_as_last = last
        else:
            self._reducing.enter_context(reducing_gradients(self.model, reduce=last and self._wide is None))
        self._computing, self._called_narrow = True, False
        try:
            computing = self._numbers.computing(self._world.device)
            with muted_batch_norm(self.model, padding), self._experts.counting(micro.samples), computing:
                yield
        except RuntimeError as error:
            explained = explain_ddp_error(error, self.model)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._computing = False

    def begin_narrow_call(self) -> bool:
        """Before an own loop calls its model. Whether that has narrow weights now, which it has not without this."""
        narrow = self._narrow
        if narrow is None or not self.has_narrow_weights or not self._computing or narrow.are_in:
            return False
        self._put_in_narrow(narrow)
        self._called_narrow = True
        return True

    def end_narrow_call(self) -> None:
        assert self._narrow is not None
        self._narrow.take_out()

    @property
    def has_narrow_weights(self) -> bool:
        return self._narrow is not None and not self._narrow_refused

    def refuse_narrow(self) -> None:
        """The model does not take narrow weights: from its next call on, it and the optimizer do without."""
        self._narrow_refused, self._one_pass = True, None

    def _put_in_narrow(self, narrow: NarrowWeights) -> None:
        self._refresh_narrow(first=not self._refreshed)
        self._refreshed = True
        narrow.put_in()

    def _seed_for(self, micro: MicroBatch, step: int) -> None:
        seed_for_micro_batch(self._seed, step, micro.position, self._world.device, *self._part)

    def _refresh_narrow(self, *, first: bool = True) -> None:
        """`first`: of this step, before which all weights were updated."""
        assert self._narrow is not None
        self._narrow.refresh(trained=first and (self._one_pass is None or self._others_write_weights))

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
        if self._narrow_in_calls and self.has_narrow_weights and not self._called_narrow:
            self.refuse_narrow()  # or the optimizer would round gradients that are wide
            if self.on_wide_loss is not None:
                self.on_wide_loss()
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
        if self._narrow is not None and self.has_narrow_weights:
            self._narrow.put_in()
        try:
            with self._reducing, self.own.backward() if self.own is not None else nullcontext():
                scaled.backward()  # type: ignore[no-untyped-call]
        finally:  # a script that goes on after a failure finds its own parameters
            if self._narrow is not None:
                self._narrow.take_out()
        if self._narrow is not None:
            if self._one_pass is None:
                self._narrow.hand_over_gradients()
            if self._narrow_refused:
                self._narrow = None
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
        if lr is not None:
            self._set_rates(lr)
        numbers = self._updated(measure_norm)
        summing = None
        if self._local_sgd is not None:
            sums = torch.stack([numbers["loss_sum"], numbers["count"]]).double()
            summing = Summing(sums, self._local_sgd.sum_over_ranks(sums))
            self._local_sgd.stepped()
        return self._readback.start(numbers, summing)

    def _set_rates(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)

    def _updated(self, measure_norm: bool) -> dict[str, Tensor]:
        """Apply the gradients of the step; the numbers that it came to, on the device."""
        loss_sum, count, correction = self._finished_sums()
        if self._wide is not None:
            self._wide.give(self._world)
        settle_gradients(self._parameters)
        trained = self._trained()
        if len(trained) < len(self._parameters) and self._world.size > 1:
            check_every_parameter_is_used(self.model)
        gradients = [local(gradient) for _, gradient in trained]
        if correction is not None:
            scale(gradients, correction)
        numbers = {"loss_sum": loss_sum, "count": count}
        if self.loss_scale is not None:
            scale(gradients, 1.0 / self.loss_scale.scale)
        if self._clip is not None or self.loss_scale is not None or measure_norm or self._guard is not None:
            numbers["grad_norm"] = self._norm(trained)
        grad_norm = numbers.get("grad_norm")
        not_finite = None
        if self._guard is not None:
            not_finite = self._guard.not_finite(loss_sum, count, grad_norm if self.loss_scale is None else None)
            numbers["not_finite"] = not_finite
        factor = clipping(self._clip, grad_norm) if self._clip is not None and grad_norm is not None else None
        if self._one_pass is not None and self._narrow is not None:
            factor = self._unscaled if factor is None else factor
            self._one_pass.update(dict(trained), self._narrow.copies(), factor)
        else:
            if factor is not None:
                scale(gradients, factor)
            numbers |= self._step_optimizer(grad_norm, not_finite)
        self._clear_gradients()
        numbers |= self._experts.settle()
        if self._guard is not None and not_finite is not None:
            self._guard.undo(not_finite)
        return numbers

    def _norm(self, trained: list[tuple[Tensor, Tensor]]) -> Tensor:
        if self._one_pass is not None and self._narrow is not None and self._all_are_updated:
            return self._one_pass.norm(dict(trained), self._narrow.copies())
        return total_norm(trained, self._world, uncounted=self._uncounted)

    def _trained(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and their gradients; those of narrow weights, where the optimizer takes them as they are."""
        narrow = self._narrow.gradients() if self._narrow is not None and self._one_pass is not None else []
        return [*((p, p.grad) for p in self._parameters if p.grad is not None), *narrow]

    def _step_optimizer(self, grad_norm: Tensor | None, not_finite: Tensor | None) -> dict[str, Tensor]:
        """An update that loss scaling or a guard may leave out; what became of the loss scale."""
        if self.loss_scale is not None and grad_norm is not None:
            overflow = (~torch.isfinite(grad_norm)).float()
            scale_before = self.loss_scale.scale.clone()
            step_unless(self.optimizer, overflow if not_finite is None else torch.maximum(overflow, not_finite))
            self.loss_scale.update(overflow)
            return {"overflow": overflow, "scale_before": scale_before, "scale_after": self.loss_scale.scale}
        if self._guard is not None and self._guard.skips and not_finite is not None:
            step_unless(self.optimizer, not_finite)
        else:
            self.optimizer.step()
        return {}

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:  # not by the optimizer: an own one may hold only some of them
            parameter.grad = None
        if self._narrow is not None:
            self._narrow.clear_gradients()

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

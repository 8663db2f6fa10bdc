"""One optimizer step: micro-batches in, gradients normalised over the global batch, clipped, applied."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gradus.data.loader import MicroBatch
from gradus.parallel.batch_norm import muted_batch_norm
from gradus.parallel.replicate import check_every_parameter_is_used, explain_ddp_error, reducing_gradients
from gradus.parallel.world import World
from gradus.training.loss_scaling import LossScale, step_unless
from gradus.training.objective import Losses, Objective
from gradus.training.precision import Numbers
from gradus.training.randomness import seed_for_micro_batch
from gradus.training.readback import PendingNumbers, Readback


class TrainingStep:
    """Everything that a step needs and that stays the same from step to step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        numbers: Numbers,
        world: World,
        *,
        accumulate: int,
        clip: float | None,
        seed: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scale = LossScale(world.device) if numbers.scales_loss else None
        self._objective = objective
        self._numbers = numbers
        self._world = world
        self._accumulate = accumulate
        self._clip = clip
        self._seed = seed
        self._readback = Readback(world.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def run(self, micro_batches: Iterator[MicroBatch], step: int, lr: float, measure_norm: bool) -> PendingNumbers:
        """Step number `step` (from 0). No line in here makes the host wait for the device."""
        loss_sum, count, correction = self._gradients(micro_batches, step)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) < len(self._parameters) and self._world.size > 1:
            check_every_parameter_is_used(self.model)
        if correction is not None:
            torch._foreach_mul_(gradients, correction)
        grad_norm, overflow, scale_before, scale_after = None, None, None, None
        if self.loss_scale is not None:
            self.loss_scale.unscale_(gradients)
        if self._clip is not None or self.loss_scale is not None or measure_norm:
            grad_norm = get_total_norm(gradients)
        if self._clip is not None and grad_norm is not None:
            clip_grads_with_norm_(self._parameters, self._clip, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.loss_scale is not None and grad_norm is not None:
            overflow = (~torch.isfinite(grad_norm)).float()
            scale_before = self.loss_scale.scale.clone()
            step_unless(self.optimizer, overflow)
            self.loss_scale.update(overflow)
            scale_after = self.loss_scale.scale
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._readback.start(
            loss_sum=loss_sum,
            count=count,
            grad_norm=grad_norm,
            overflow=overflow,
            scale_before=scale_before,
            scale_after=scale_after,
        )

    def warm_up(self, micro_batches: Iterator[MicroBatch]) -> None:
        """A step whose result is thrown away.

        DDP orders its buckets by the first backward and regroups them at the second forward. A resumed run would
        therefore reduce its first step in another order than one that was never stopped; after this, both are past it.
        """
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self._gradients(micro_batches, step=0)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])

    def _gradients(self, micro_batches: Iterator[MicroBatch], step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Accumulate gradients; return the global loss sum and count, and what gradients must still be multiplied with.

        The mean is over all valid tokens or samples of the step, on all ranks. Their number is known only after the
        last forward pass, so gradients are first divided by what the first micro-batch lets expect, which keeps them in
        the range of fp16, and then corrected. Without accumulation that is already exact.
        """
        for index in range(self._accumulate):
            micro = next(micro_batches)
            with reducing_gradients(self.model, reduce=index == self._accumulate - 1):
                losses = self._forward(micro, step)
                if index == 0:
                    loss_sum, count = losses.loss_sum.detach(), losses.count
                    if self._accumulate > 1:  # what is added up and divided below must not lose digits
                        loss_sum, count = loss_sum.double(), count.double()
                    totals = self._over_ranks(loss_sum, count)
                    expected = self._expected_share(totals[1])
                else:
                    loss_sum, count = loss_sum + losses.loss_sum.detach(), count + losses.count
                scaled = losses.loss_sum / expected.to(losses.loss_sum.dtype)
                if self.loss_scale is not None:
                    scaled = scaled * self.loss_scale.scale
                scaled.backward()  # type: ignore[no-untyped-call]
        if self._accumulate == 1:
            return (*totals, None)
        totals = self._over_ranks(loss_sum, count)
        correction = expected * self._world.size / totals[1].clamp(min=1)
        return (*totals, correction.to(losses.loss_sum.dtype))

    def _over_ranks(self, loss_sum: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Both summed over all ranks, in one collective and in float64."""
        if self._world.size == 1:
            return loss_sum, count
        sums = self._world.sum_(torch.stack([loss_sum, count]).double())
        return sums[0], sums[1]

    def _expected_share(self, count_of_first: Tensor) -> Tensor:
        """What a rank divides its losses by: the expected count of the step over the ranks, because DDP averages."""
        share = self._accumulate / self._world.size
        return (count_of_first if share == 1 else count_of_first * share).clamp(min=share)

    def _forward(self, micro: MicroBatch, step: int) -> Losses:
        seed_for_micro_batch(self._seed, step, micro.position, self._world.device)
        padding = micro.samples == 0
        try:
            with muted_batch_norm(self.model, padding), self._numbers.computing(self._world.device):
                return self._objective(self.model, micro.inputs, micro.samples)
        except RuntimeError as error:
            explained = explain_ddp_error(error, self.model)
            if explained is error:
                raise
            raise explained from error

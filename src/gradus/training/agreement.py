"""Agreement: whether the replicas of a live run still hold the same, asked every so many steps and before each save."""

from __future__ import annotations

from gradus.faults.checksums import Comparison, Replicas, SilentCorruption, trained_tensors
from gradus.training.live_run import LiveRun


class Agreement:
    """All ranks ask at the same boundaries. What came out is read one step late, when it has arrived."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self.last_step = live.state.step  # at which all agreed, or which they began from
        self._every = live.recipe.checksums.every
        # Replicas that step alone agree only when they have met; those of one rank always do.
        self._asks = self._every is not None and live.world.size > 1 and live.local_sgd is None
        # What each rank of a tensor group computes for itself: GPU kernels may add up in any order.
        alike = live.world.device.type == "cpu" or live.recipe.deterministic
        self._replicas = Replicas(live.world, alike_over_tensor=alike)
        self._late: tuple[int, Comparison] | None = None

    def compare_if_due(self) -> None:
        """After a step was launched: the checksums of its result are on their way when this returns."""
        if self._asks and self._every is not None and self._live.state.step % self._every == 0:
            self._late = self._live.state.step, self._started()

    def taken_in(self) -> SilentCorruption | None:
        """What came out of the last comparison, if it was not told before."""
        late, self._late = self._late, None
        if late is None:
            return None
        step, comparison = late
        difference = comparison.wait()
        if difference is None:
            self.last_step = step
            self._asks = comparison.finds_replicas
            return None
        return difference.error(step, self.last_step)

    def compared_now(self) -> SilentCorruption | None:
        """Before a checkpoint, where ranks meet anyway."""
        if self._asks and self.last_step != self._live.state.step and self._late is None:
            self._late = self._live.state.step, self._started()
        return self.taken_in()

    def _started(self) -> Comparison:
        return self._replicas.start(trained_tensors(self._live.model, self._live.optimizer))

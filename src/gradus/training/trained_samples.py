"""Trained samples: what this rank has trained on goes into its sample log, for `gradus data audit` to check."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gradus.data.loader import MicroBatch
from gradus.data.position import specification_hash
from gradus.data.sample_log import SampleLog
from gradus.data.transfer import closed_after

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


class TrainedSamples:
    """Of ranks that work on the same samples, the first writes the log; on the others this does nothing."""

    def __init__(self, live: LiveRun) -> None:
        """Data and state are there: from the present step on, it is noted what comes."""
        self._live = live
        place, leads = live.world.place, live.world.leads
        self._log: SampleLog | None = None
        if place.pipeline or place.context or place.tensor:
            return
        report = partial(live.recorder.problem, "write-error")
        self._log = SampleLog(live.run.path, live.attempt, live.world.data_rank, report)
        self._log.begin(
            live.state.step,
            batch=live.recipe.batch,
            data_ranks=live.world.data_ranks,
            total_samples=live.total_samples,
            specification=specification_hash(live.specification),
            skipped=live.state.skipped_positions,
            described=live.specification if leads else None,
        )

    def noted(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches as they come, each noted for the step that takes it."""
        with closed_after(batches):
            for micro in batches:
                if self._log is not None:
                    self._log.note(self._live.state.step, micro.position, micro.samples, micro.numbers_digest)
                yield micro

    def flush(self) -> None:
        """Before a checkpoint of the present step: what led to it is on the disk first."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            for problem in self._log.close():
                self._live.recorder.problem("write-error", problem)

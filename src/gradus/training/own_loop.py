"""Own loop: a training loop of the user's own, with everything around a step taken care of.

    run = gradus.Run.start("recipe.yaml")
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(dataset):
        run.step(loss_of(model, batch))

The recipe needs only a name, a batch and a budget. Start the script with `gradus train --nproc 4 -- script.py`, with
torchrun, or with plain python.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gradus.data.loader import Indexed, MicroBatch
from gradus.faults.signals import Signals, handled
from gradus.record.format import count_text, first_line
from gradus.record.lock import release
from gradus.schema.errors import EXIT_FAILED, EXIT_STOPPED, GradusError, InputError
from gradus.schema.recipe import OWN, Recipe
from gradus.training.boundary import Boundary, Ending, Launched
from gradus.training.compiled_in_place import compiled_in_place
from gradus.training.described import described_as
from gradus.training.device import compute_capability
from gradus.training.graphed_step import GraphedStep
from gradus.training.joining import Place, join, plan_file, write_files
from gradus.training.leaving import end, tell_ending, tell_failure
from gradus.training.live_run import Evaluator, LiveRun
from gradus.training.loop import TimedBatches
from gradus.training.loss_placement import with_loss_chunks
from gradus.training.model_to_step import use_model
from gradus.training.narrow_calls import hint_at_narrow_weights, narrow_calls
from gradus.training.out_of_memory import explain_out_of_memory, out_of_memory_explained
from gradus.training.own_evaluation import Results, measure_of
from gradus.training.own_loss import backward_explained, own_sum_and_count
from gradus.training.own_optimizer import check_arguments, check_optimizer, check_scheduler, note_learning_rates
from gradus.training.own_process import Shown, exit_code, exits_noted, failed_exit, on_failure, on_refusal
from gradus.training.randomness import seed_for_construction
from gradus.training.readback import PendingNumbers
from gradus.training.same_on_ranks import check_same_data_on_ranks
from gradus.training.shape_errors import described, note_tensors


class Run:
    """A run whose loop is in the user's script. `start` makes one."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        self._place = place
        # Of a script or a notebook that nobody launched, whoever sits before it knows whether it hangs.
        watched = place.launched or place.world.size > 1
        self._live = LiveRun(recipe, place.choice.plan, place.run, place.attempt, place.world, watched=watched)
        self._prepared = False
        self._boundary: Boundary | None = None
        self._micro: MicroBatch | None = None  # handed out, and its loss not yet given to `step`
        self._forward: AbstractContextManager[None] | None = None
        self._stream: TimedBatches | None = None
        # By `batches`. The script may hold it longer than its loop; were it held here, a loop that is left with `break`
        # would not end its last batch, and what comes after it would be computed as if inside.
        self._handed_out: weakref.ref[Generator[Any, None, None]] | None = None
        self._waited_seconds = 0.0
        self._ending: Ending | None = None
        self._failed: str | None = None  # what did, if it has not been told
        self._leaves_with: object = None  # what the script has told Python to leave with; nothing and 0 are orderly
        self._left_in: str | None = None  # the batch in whose midst the loop was left
        self._left_early = False  # the loop, and it is not known yet whether the other ranks have as well
        self._told = False
        self._signals: Signals | None = None
        self._handling = ExitStack()  # of signals
        self._evaluators: dict[int, tuple[Any, Evaluator]] = {}
        self._display: Shown | None = None
        if place.world.leads and not place.launched:
            ranks = count_text(place.world.size, "rank")
            self._display = Shown(place.run, recipe.steps, f"{recipe.name}: {ranks}, {place.run.path}")

    @classmethod
    def start(
        cls, recipe: Recipe | str | Path | Mapping[str, Any], *, runs: str | Path = "runs", resume: str | None = None
    ) -> Run:
        """Join the other ranks, if there are any, and open the run's directory."""
        from gradus.launcher.device_sampler import DeviceSampler, gpus_used_by, with_descendants
        from gradus.launcher.given import recipe_given  # what callers of gradus.train may hand over, too

        try:
            given = recipe_given(recipe)
            if given.deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            run = cls(given, join(given, Path(runs), resume))
            seed_for_construction("model", given.seed)  # a model that is built from here on starts as a recipe's would
        except GradusError as error:
            on_refusal(error)
            raise
        if not run._place.launched and run._place.world.local_rank == 0:  # nobody else looks at the devices
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            of = partial(with_descendants, os.getpid() if here == 1 else os.getppid())
            gpus = gpus_used_by(here, given)
            run._handling.callback(DeviceSampler(run._place.run, run._place.attempt, gpus, of).close)
        run._watch()
        return run

    @property
    def rank(self) -> int:
        return self._place.world.rank

    @property
    def ranks(self) -> int:
        return self._place.world.size

    @property
    def device(self) -> torch.device:
        """Where `prepare` puts the model, and where batches are."""
        return self._place.world.device

    @property
    def directory(self) -> Path:
        return self._place.run.path

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, those before a resume included."""
        return self._live.state.step

    @property
    def stopped(self) -> bool:
        """Whether the loop ended because the run was asked to stop: it is saved and will be continued."""
        return self._ending is not None and self._ending.state == "stopped"

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as the plan wants it, and its optimizer; both as the last checkpoint left them, if there is one.

        The recipe's `model.weights`, `freeze` and `lora` apply. Without an optimizer, the recipe's is made. A scheduler
        of torch's is stepped once for each optimizer step from now on, by `step`, and kept in checkpoints.
        """
        live = self._live
        check_arguments(model, optimizer, scheduler)
        if self._prepared:
            raise InputError("run.prepare: it was called before; one model and one optimizer to a run", field="prepare")
        model = compiled_in_place(model)
        double = live.numbers.parameters == torch.float64
        divided = live.plan.divided  # then each rank gets its part of rank 0's values, and no device all of them
        model = model.to(device=None if divided else self.device, dtype=torch.float64 if double else None)
        if optimizer is None and live.recipe.optimizer.use == OWN:
            raise InputError(
                "run.prepare: there is no optimizer: none was given, and the recipe names none",
                hint="run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))",
                field="optimizer",
            )
        if optimizer is not None:
            check_optimizer(optimizer, model, live.recipe)
            replaced = note_learning_rates(optimizer, live.recipe.optimizer)
            if replaced and scheduler is None:
                live.recorder.event("learning-rate", message=replaced)
        if scheduler is not None:
            check_scheduler(scheduler, optimizer, live.recipe)
            live.scheduler = scheduler
        with self._failing():
            begins = live.checkpoint is None
            described = described_as(live.recipe, model, live.world, divided=divided, load_weights=begins)
            choice = with_loss_chunks(self._place.choice, live.recipe, described.model, compute_capability(self.device))
            if choice is not self._place.choice:
                live.plan = choice.plan
                if live.world.leads:
                    write_files(self._place.run, self._place.attempt, plan_file(choice))
            use_model(live, described, optimizer, fixed_buckets=live.recipe.deterministic)
            restored = live.restore()
            assert restored, "every byte was compared before, since a model of the script's is not built anew"
        self._prepared = True
        return live.step.model, live.optimizer

    def batches(self, dataset: Any) -> Iterator[Any]:
        """The micro-batches of this rank until the budget is spent or the run is to stop, on the device.

        `dataset` has `__len__` and `__getitem__`. After each batch, its loss goes to `step`.
        """
        if not self._prepared:
            raise InputError("run.batches: call run.prepare(model, optimizer) first", field="batches")
        live, data = self._live, Indexed(dataset, "run.batches")
        with self._failing():
            live.use_data(data)
            check_same_data_on_ranks(live)
            live.begin()
        compiled_in_place(live.model)  # what the script has compiled since `prepare`
        samples = live.samples.noted(live.loader.micro_batches(live.state.step, live.total_steps))
        self._stream = TimedBatches(samples, live.watch.where)
        self._boundary, self._left_early = Boundary(live), False
        live.watch.where.enter("hooks")
        live.hooks.on_start()
        handed_out = self._micro_batches(self._boundary, self._stream)
        self._handed_out = weakref.ref(handed_out)
        return handed_out

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """If what is done inside fails, so has the run: also where the script catches that and comes to its end."""
        try:
            with self._live.recorder.told_of_failure(), out_of_memory_explained(self._live):
                yield
        except BaseException as error:
            self._note_failure(error)
            raise

    def _micro_batches(self, boundary: Boundary, stream: TimedBatches) -> Generator[Any, None, None]:
        step = self._live.step
        calls = narrow_calls(step.model, step, self._live.warn) if step.has_narrow_weights else nullcontext()
        with calls:
            yield from self._until_end(boundary, stream)

    def _until_end(self, boundary: Boundary, stream: TimedBatches) -> Iterator[Any]:
        try:
            while True:
                if self._signals is not None:
                    self._signals.answer()
                self._ending = boundary.reached()
                if self._ending is not None:
                    return
                self._waited_seconds = stream.waited_seconds
                for _ in range(self._live.step.accumulate):
                    self._micro = next(stream)
                    self._forward = self._live.step.forward(self._micro, self._live.state.step)
                    self._forward.__enter__()  # until `step`: what the loop's body computes is the forward pass
                    yield self._micro.inputs
                    if self._micro is not None:
                        raise InputError(
                            f"own loop: run.step(loss) was not called for a batch of step {self.steps_done + 1}",
                            hint="call it once for each batch that run.batches gives; ranks wait for each other there",
                            field="step",
                        )
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            self._live.watch.where.enter("after-loop")
            # Left with `break`, or by an exception: `finish` saves unless the script fails, which is not known here.
            if self._forward is not None and self._micro is not None:
                self._forward.__exit__(None, None, None)
                self._live.step.abandon()
                self._left_in = described(self._micro.inputs)
            self._micro = self._forward = None
            self._left_early = self._ending is None
            stream.close()

    def step(self, loss: Any) -> None:
        """Take the loss of the batch: a scalar mean, or `(sum, count)`; or a function that returns it for a batch.

        With the last micro-batch of a step, the gradients are normalised over the global batch, clipped and applied.
        With `plan.cuda_graph`, only a function can be recorded; it must then do the same each time.
        """
        live, micro, boundary, stream = self._live, self._micro, self._boundary, self._stream
        if micro is None or self._forward is None or boundary is None or stream is None:
            raise InputError(
                "run.step: there is no batch whose loss this could be",
                hint="call it once in the body of `for batch in run.batches(dataset)`",
                field="step",
            )
        self._failed = f"step {self.steps_done + 1} failed"  # unless it comes to its end
        self._leaves_with = None  # the script goes on
        if callable(loss) and isinstance(live.step, GraphedStep):
            self._step_as_graphs(live.step, loss, micro, boundary, stream)
            self._failed = None
            return
        if callable(loss):
            loss = loss(micro.inputs)
        self._forward.__exit__(None, None, None)
        self._micro = self._forward = None
        loss_sum, count = self._sum_and_count(loss, micro)
        if micro.samples == 0:  # padding: this rank has no sample left in the last step of the run
            loss_sum, count = loss_sum * 0, count * 0
        with backward_explained():
            live.step.backward(loss_sum, count)
        if live.step.complete:
            self._apply(boundary, stream)
        self._failed = None

    def _sum_and_count(self, loss: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return own_sum_and_count(loss, micro.samples, self._live.plan.mesh.context)

    def _step_as_graphs(
        self,
        step: GraphedStep,
        loss_of: Callable[[Any], Any],
        micro: MicroBatch,
        boundary: Boundary,
        stream: TimedBatches,
    ) -> None:
        assert self._forward is not None
        self._forward.__exit__(None, None, None)  # it was entered for a loop that computes the loss itself
        self._micro = self._forward = None
        step.abandon()
        step.measure = lambda inputs: self._sum_and_count(loss_of(inputs), micro)
        numbers = step.run(iter([micro]), self._live.state.step, self._rate(), measure_norm=True)
        self._launched(numbers, boundary, stream)

    def _apply(self, boundary: Boundary, stream: TimedBatches) -> None:
        live = self._live
        numbers = live.step.apply(self._rate(), measure_norm=live.recorder.logs(live.state.step + 1))
        self._launched(numbers, boundary, stream)

    def _rate(self) -> float | None:
        """Of the recipe's schedule; None where the script has one of its own."""
        live, block = self._live, self._live.recipe.optimizer
        own_rate = live.scheduler is not None or (block.use == OWN and not block.schedules)
        return None if own_rate else live.schedule(live.state.schedule_position())

    def _launched(self, numbers: PendingNumbers, boundary: Boundary, stream: TimedBatches) -> None:
        live = self._live
        first = float(live.optimizer.param_groups[0]["lr"])
        if live.scheduler is not None:
            live.scheduler.step()
        waited = stream.waited_seconds - self._waited_seconds
        boundary.launched(Launched(live.state.step, first, waited, numbers))
        live.watch.where.enter("own-code")

    @property
    def evaluation_due(self) -> bool:
        """Whether the recipe wants an evaluation now: after every so many steps (`evaluate.every`) and at the end."""
        live = self._live
        if self._boundary is None or self._micro is not None or live.step.under_way:
            return False
        return live.evaluation_due

    def evaluate(self, dataset: Any, loss: Callable[[Any], Any]) -> dict[str, float]:
        """Means over the samples of `dataset` on all ranks, recorded as `validation_...`. All ranks must call it.

        `loss(batch)` returns what `step` takes, or a dict of such, with `loss` among them. The model is in evaluation
        mode and no gradients are kept meanwhile.
        """
        live = self._live
        if self._micro is not None:
            raise InputError("run.evaluate: call run.step(loss) for the present batch first", field="evaluate")
        if not self._prepared:
            raise InputError("run.evaluate: call run.prepare(model, optimizer) first", field="evaluate")
        if self._boundary is not None:
            self._meet_others_who_left()
            self._boundary.settle()
            self._boundary.save_if_out_of_budget()
        results = live.evaluate(measure_of(loss, self._signals, live.plan.mesh.context), self._evaluator(dataset))
        if results is None and self._boundary is not None:
            self._boundary.interrupted = True
        return Results(results or {})

    def log(self, **numbers: float) -> None:
        """Numbers of the user's own, written into the metrics of the present step by rank 0."""
        self._live.recorder.log(self.steps_done, numbers)

    def finish(self) -> None:
        """Close the run's record. Done by itself when the script ends; what is logged after it is lost."""
        if self._told:
            return
        handed_out = self._handed_out() if self._handed_out is not None else None
        if handed_out is not None:  # else what fetches data would last until Python takes its modules apart
            handed_out.close()
        if self._failed is not None:
            self._fail(self._failed)
            tell_failure(self._place.run, self._place.attempt, GradusError(self._failed), self.rank)
            self._say_ending(f"failed: {self._failed}")
            return
        self._meet_others_who_left()
        if self._ending is None:
            reason = f"the loop was left after {count_text(self.steps_done, 'step')}"
            self._ending = self._boundary.left(reason) if self._boundary else Ending("finished", reason)
        self._close_display()
        self._told = True
        tell_ending(self._live, self._ending)
        again = f"; continue with resume={str(self.directory)!r}" if self.stopped else ""
        self._say_ending(f"{self._ending.state}: {self._ending.reason}", again)
        self._give_back()

    def _meet_others_who_left(self) -> None:
        """Before anything that all ranks do together after a loop that was left before its end."""
        if self._left_early and self._boundary is not None:
            with self._failing():
                self._boundary.meet_others()
            self._left_early = False

    def _note_failure(self, error: BaseException) -> None:
        """Its words alone: with it, tensors of the frames that it came through would be kept."""
        self._failed = first_line(error) or type(error).__name__

    def _note_exit(self, error: SystemExit) -> None:
        self._leaves_with = error.code

    def _say_ending(self, text: str, again: str = "") -> None:
        if self._display is not None:
            print(f"{text}, run {self.directory}{again}", file=sys.stderr)

    def _fail(self, message: str) -> None:
        self._told = True
        self._close_display()
        self._live.saving.rescue()
        self._live.recorder.close(state="failed", last_error=message)
        self._give_back()

    def _close_display(self) -> None:
        if self._display is not None:
            self._display.close()

    def _give_back(self) -> None:
        """The process may go on, with signals as they were and, for example, another attempt at this run."""
        self._handling.close()
        if self._place.lock is not None:
            release(self._place.lock)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            self._note_failure(error)  # which is told sooner if nobody catches it
        elif isinstance(error, SystemExit):
            self._note_exit(error)

    def _evaluator(self, dataset: Any) -> Evaluator:
        """Kept by dataset: one that is in memory goes to the device once."""
        if id(dataset) not in self._evaluators:
            data = Indexed(dataset, "run.evaluate")
            self._evaluators[id(dataset)] = (dataset, self._live.evaluator_for(data))
        return self._evaluators[id(dataset)][1]

    def _watch(self) -> None:
        """From here on a signal is a stop request, and a failure is told before the process ends."""
        say = self._display.say if self._display is not None else lambda text: None
        self._signals = Signals(self._place.run, say, raises=True)
        self._handling.enter_context(handled(self._signals))
        self._handling.enter_context(exits_noted(self._note_exit))
        atexit.register(self._leave)
        on_failure(self._place.run, self._place.attempt, self.rank, self._fail, lambda: self._told, self._explained)

    def _explained(self, error: BaseException) -> BaseException:
        self._live.watch.explain(error)
        if self._prepared and self._live.step.has_narrow_weights:
            hint_at_narrow_weights(error)
        if self._prepared:
            batch = described(self._micro.inputs) if self._micro is not None else self._left_in
            note_tensors(error, self._live.step.model, batch)
        return explain_out_of_memory(error, live=self._live)

    def _leave(self) -> None:
        left = failed_exit(self._leaves_with, self.rank if self.ranks > 1 else None)
        if left is not None and not (self.stopped and self._leaves_with == EXIT_STOPPED):
            self._failed = f"{self._failed}; {left}" if self._failed is not None else left
        try:
            self.finish()
        except Exception as error:  # raised from here, Python would print it and leave with 0
            sys.excepthook(type(error), error, error.__traceback__)
        if self._failed is not None and self.ranks > 1:
            end(exit_code(self._leaves_with) or EXIT_FAILED)  # as of an exception: others may be waiting for this rank
        self._place.connection.close()
        if self.stopped and self._failed is None and not self._place.launched and self.ranks == 1:
            end(EXIT_STOPPED)  # a script that comes to its end would leave with 0: finished

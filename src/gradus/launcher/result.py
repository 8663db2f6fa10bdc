"""Result: a run as Python sees it: how it ended, or how far it is, and what it left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradus.launcher.saved import SavedCheckpoint, saved_checkpoints
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.format import first_line, number_text
from gradus.record.metrics import EPOCH_NUMBERS, epochs, read_metrics
from gradus.record.outcome import read_outcome
from gradus.record.plot import plot_metrics
from gradus.record.status import read_status, shown_state
from gradus.record.summary import summary_text
from gradus.record.table import Table
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

Split = Literal["train", "validation"]


@dataclass(frozen=True, repr=False)
class Result:
    """A run and how it ended. `exit_code` is what `gradus train` leaves with; None while the run has not ended."""

    run: RunDirectory
    state: str
    exit_code: int | None
    step: int
    loss: float | None
    reason: str | None = None
    error: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, run: str | Path, runs: str | Path = "runs") -> Result:
        """A run from its directory, or from its id or name in the folder `runs`; it may well be running.

        What is read of its files (metrics, checkpoints, log) is always of now; state, step and loss are of this moment.
        """
        return _loaded(RunDirectory.open(str(run), Path(runs)))

    @property
    def metrics(self) -> Table:
        """One row for each logged step, with the evaluation of that step, in columns."""
        return Table(read_metrics(self.run))

    @property
    def epochs(self) -> Table:
        """One row for each pass over the data: the step that ended it, its mean training loss and its speed."""
        return Table(epochs(read_metrics(self.run)), ("epoch", "step", *EPOCH_NUMBERS))

    @property
    def recipe(self) -> Recipe:
        """As it was resolved for the newest attempt."""
        return Recipe.load(self._attempt_folder() / "recipe.yaml")

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints that are there to be loaded, oldest first."""
        return saved_checkpoints(self.run)

    def load_model(
        self,
        step: int | str | None = None,
        device: str = "cpu",
        *,
        weights: str = "model",
        model: nn.Module | None = None,
    ) -> nn.Module:
        """The trained model in evaluation mode, to predict with.

        `step` is that of a checkpoint, or `"best"` for the one with the best evaluation; the newest by default. The
        checkpoint is verified. `weights="ema"` takes the moving average that the hook `ema` keeps. The model is built
        from the run's recipe; where an own loop made it, give one as `model`.
        """
        from gradus.training.trained_model import load_trained

        return load_trained(self.run, step, device, weights, model)

    def batch(self, samples: int = 8, split: Split = "validation", device: str = "cpu") -> Any:
        """The first samples of the run's validation or training data, prepared as the model saw them in training."""
        from gradus.training.trained_model import first_samples

        return first_samples(self.run, samples, split, device)

    def plot(
        self,
        *names: str,
        against: Result | Sequence[Result] | Mapping[str, Result] = (),
        label: str | None = None,
        log: bool = False,
    ) -> Any:
        """A matplotlib figure of metrics against steps: loss and validation loss, or those that are named.

        `against` adds other runs: one, several, or several with the names to show. `label` is the name of this one.
        """
        others = [against] if isinstance(against, Result) else against
        if not isinstance(others, Mapping):
            others = {other._label(): other for other in others}
        tables = {label or self._label(): self.metrics}
        for name, other in others.items():
            if name in tables:
                raise InputError(f"against: two runs have the name {name!r}", hint="give label=", field="against")
            tables[name] = other.metrics
        return plot_metrics(tables, names, log=log)

    def log(self, rank: int | None = None, attempt: int | None = None) -> str:
        """What the ranks printed in an attempt (the newest); of one rank, where lines say whose they are."""
        folder = self._attempt_folder(attempt) / "logs"
        text = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
        return text if rank is None else _lines_of_rank(text, rank)

    def summary(self) -> str:
        """What came of the run in a few lines, as `gradus train` prints it."""
        return summary_text(self.run)

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        document: dict[str, Any] = {
            "run": str(self.run.path),
            "state": self.state,
            "exit_code": self.exit_code,
            "step": self.step,
            "loss": self.loss,
            "reason": self.reason,
        }
        if self.error:
            document["error"] = self.error
        if self.problems:
            document["problems"] = self.problems
        return document

    def __repr__(self) -> str:
        loss = f", loss {number_text(self.loss)}" if self.loss is not None else ""
        error = f", error: {first_line(self.error['message'])}" if self.error else ""
        return f"<run {self._label()}: {self.state} at step {self.step}{loss}{error}; {self.run.path}>"

    def _repr_html_(self) -> str:
        error = f"<div>error: {escape(str(self.error['message']))}</div>" if self.error else ""
        rows = "".join(
            f"<tr><td>{escape(label.strip())}</td><td style='text-align:left'>{escape(value.strip())}</td></tr>"
            for label, _, value in (line.partition("  ") for line in self.summary().splitlines())
        )
        return f"<div><b>{escape(self._label())}</b>: {escape(self.state)}</div>{error}<table>{rows}</table>"

    def _label(self) -> str:
        return f"{self.run.name}/{self.run.id}"

    def _attempt_folder(self, attempt: int | None = None) -> Path:
        attempts = self.run.attempts
        if not attempts or attempt not in (None, *attempts):
            raise InputError(
                f"attempt: found {attempt}, allowed: {', '.join(map(str, attempts)) or 'none, the run has not begun'}",
                field="attempt",
                found=attempt,
                allowed=attempts,
            )
        return self.run.attempt_path(attempts[-1] if attempt is None else attempt)


def load_run(run: str | Path, runs: str | Path = "runs") -> Result:
    """Open a run by its directory, or by its id or name in the folder `runs`, from anywhere."""
    return Result.load(run, runs)


def _loaded(run: RunDirectory) -> Result:
    status = read_status(run)
    attempt = max(run.attempts, default=0)
    outcome = read_outcome(run, attempt) or {}
    # The launcher has the last word: rank 0 may not know that another rank failed after it.
    events = [event for event in read_events(run) if event.get("writer") == f"launcher-attempt-{attempt}"]
    ends = [event for event in events if event["event"] == "end"]
    found = [str(event["message"]) for event in events if event["event"] == "finding"]
    ended = {**outcome, **({k: ends[-1].get(k) for k in ("state", "exit_code", "error")} if ends else {})}
    state = shown_state(status) if status else str(ended.get("state", "unknown"))
    losses = [row["loss"] for row in read_metrics(run) if row.get("loss") is not None]
    return Result(
        run,
        str(ended.get("state") or state),
        ended.get("exit_code"),
        outcome.get("step", status.step if status else 0),
        outcome.get("loss", losses[-1] if losses else None),
        outcome.get("reason"),
        ended.get("error"),
        [*outcome.get("problems", []), *found],
    )


def _lines_of_rank(text: str, rank: int) -> str:
    mark = f"[rank{rank}]:"
    lines = [line.removeprefix(mark) for line in text.splitlines(keepends=True) if line.startswith(mark)]
    return "".join(line.removeprefix(" ") for line in lines)

"""`gradus plan --measure`: a few real steps here, compared with their prediction; factors go into the cluster file."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradus.hardware.cluster import detect_cluster, gpu_of
from gradus.planner.calibration import Compared, Measured, calibration_of, compared
from gradus.planner.prediction import predict
from gradus.planner.resolve import prepare_data
from gradus.planner.shown import gib_text, memory_words, seconds_text
from gradus.record.format import count_text
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError, NoPlanFits
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

FOLDER = Path("clusters")  # where `--cluster NAME` looks first


@dataclass(frozen=True)
class Calibrated:
    """The cluster with what was measured, and where that is written."""

    cluster: Cluster
    file: Path
    measured: Measured
    lines: list[Compared]

    def document(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "measured": asdict(self.measured),
            "compared": [asdict(line) for line in self.lines],
            **self.cluster.calibration.model_dump(),
        }

    def text(self) -> list[str]:
        """For people."""
        found = self.cluster.calibration
        rows = [("", "predicted", "measured", "factor"), *(_row(line) for line in self.lines)]
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{count_text(self.measured.steps, 'step')} on {found.device}, {found.software}, one rank"]
        for first, *rest in rows:
            texts = [text.rjust(size) for text, size in zip(rest, sizes[1:], strict=True)]
            lines.append(f"  {first.ljust(sizes[0])}  {'  '.join(texts)}".rstrip())
        if found.flops_per_second is not None:
            lines.append(
                f"  {found.flops_per_second / 1e9:,.4g} GFLOP/s achieved: nobody quotes the speed of this device"
            )
        return [*lines, f"written to {self.file}; later plans use it with --cluster {self.file}"]


def calibrate(recipe: Recipe, site: Cluster, given: str | None, plan: Plan) -> Calibrated:
    """Measure the recipe here, as one rank of the plan would run it, and write the factors down. See `check_is_here`.

    `given` is what --cluster says. A file is changed in place; of a cluster that has only a name, and of this machine,
    there is a file from now on.
    """
    from gradus.training.calibration import measure, on_one_rank  # needs torch

    prepare_data(recipe)
    here, alone = on_one_rank(recipe, plan)
    plain = site.model_copy(update={"calibration": Calibration()})
    prediction = predict(here, plain, alone)
    if prediction.verdict == "no":
        raise NoPlanFits(
            f"--measure: one rank of the plan without its peers needs {memory_words(prediction)}",
            hint="measure a smaller model of the same kind, such as --set model.layers=2: factors are of operators",
            field="--measure",
        )
    with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is no part of our document
        measured = measure(here, alone)
    lines = compared(prediction, measured)
    found = calibration_of(lines, measured, prediction.hardware_flops, speed_known=prediction.step is not None)
    before = site.calibration
    if (before.device, before.software) == (found.device, found.software):  # what one rank does not show is kept
        found = found.model_copy(update={"factors": {**before.factors, **found.factors}})
    # As the file has it: --gpus may have changed the number of nodes for this plan alone.
    stored = Cluster.load(given) if given is not None else Cluster.detect()
    file = Path(given) if given is not None and Path(given).is_file() else FOLDER / f"{stored.name}.yaml"
    stored.model_copy(update={"calibration": found}).save(file)
    return Calibrated(site.model_copy(update={"calibration": found}), file, measured, lines)


def check_is_here(site: Cluster) -> None:
    """Factors of another device would be worse than none."""
    wanted, found = gpu_of(site), gpu_of(detect_cluster())
    names = [gpu.name if gpu else "no GPU" for gpu in (wanted, found)]
    if names[0] != names[1]:
        raise InputError(
            f"--measure: {site.name} has {names[0]}, but this machine has {names[1]}",
            hint="run it on a node of that cluster",
            field="--measure",
            found=names[1],
            allowed=names[0],
        )


def _row(line: Compared) -> tuple[str, str, str, str]:
    text = gib_text if line.unit == "bytes" else seconds_text
    predicted = text(line.predicted) if line.predicted is not None else "not known"
    return line.kind.replace("_", " "), predicted, text(line.measured), f"× {line.factor:.3g}" if line.factor else ""

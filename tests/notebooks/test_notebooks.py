"""The example notebooks run from top to bottom with small settings, and what they show is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def executed(name: str, folder: Path, values: str, **settings: Any) -> dict[str, Any]:
    """Run a notebook in a kernel of its own; what `values`, a dict expression, is there in the end."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    report = f"import json, pathlib\npathlib.Path('values.json').write_text(json.dumps({values}))"
    notebook.cells.append(nbformat.v4.new_code_cell(report))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("OMP_NUM_THREADS", "1")
        for key, value in settings.items():
            patch.setenv(f"NOTEBOOK_{key}", str(value))
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    return {
        "pictures": sum("image/png" in output.get("data", {}) for output in outputs),
        "text": "".join(output.text for output in outputs if output.output_type == "stream"),
        **json.loads((folder / "values.json").read_text()),
    }


def test_there_are_four():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_without_outputs(name):
    text = (FOLDER / f"{name}.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_one_device(tmp_path):
    found = executed(
        "01-one-device",
        tmp_path,
        "{'parameters': parameters, 'state': result.state, 'accuracy': accuracy, 'right': right,"
        " 'losses': result.metrics['loss'], 'training': model.training}",
        STEPS=16,
        BATCH=32,
    )
    assert found["parameters"] == 2_474_506
    assert found["state"] == "finished"
    assert len(found["losses"]) == 16
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    # Ten classes: far better than a guess, in the run's evaluation and in the notebook's own predictions.
    assert found["accuracy"] > 0.4
    assert found["right"] > 0.4
    assert found["training"] is False
    assert found["pictures"] == 3


@pytest.mark.slow
def test_several_ranks(tmp_path):
    found = executed(
        "02-several-ranks",
        tmp_path,
        "{'differences': differences, 'speed': list(speed), 'devices': wrapped.device_ids,"
        " 'data_parallel': data_parallel_difference, 'losses': {n: run.metrics['loss'] for n, run in runs.items()}}",
        RANKS="1,2",
        BATCH=16,
        STEPS=6,
    )
    assert found["differences"]["1"] == 0
    assert found["differences"]["2"] < 1e-9
    assert len(found["losses"]["2"]) == 6
    assert found["losses"]["2"][-1] != found["losses"]["2"][0]
    assert [row["ranks"] for row in found["speed"]] == [1, 2]
    one, two = found["speed"]
    assert one["speed_up_over_1_rank"] == one["efficiency"] == 1
    assert two["speed_up_over_1_rank"] == pytest.approx(two["samples_per_second"] / one["samples_per_second"])
    assert two["efficiency"] == pytest.approx(two["speed_up_over_1_rank"] / 2)
    if not found["devices"]:
        assert found["data_parallel"] == 0
        assert "without GPUs it just calls the model" in found["text"]
    assert found["pictures"] == 1


@pytest.mark.slow
def test_mixed_precision(tmp_path):
    found = executed(
        "03-mixed-precision",
        tmp_path,
        "{'numbers': [[row[c] for c in ('2**-25 becomes', '1.001 becomes')] for row in numbers],"
        " 'large': [str(row['65520 becomes']) for row in numbers], 'without': without, 'rescued': rescued,"
        " 'precisions': list(precisions), 'scaled': scaled,"
        " 'losses': {precision: run.metrics['loss'] for precision, run in runs.items()}}",
        BATCH=4,
        STEPS=5,
    )
    assert found["numbers"] == [[2.0**-25, "1.001000"], [2.0**-25, "1.000000"], [0.0, "1.000977"]]
    assert found["large"] == ["65520.0", "65536.0", "inf"]
    assert found["without"] == 0
    assert found["rescued"] == 2.0**-25
    assert [row["precision"] for row in found["precisions"]] == ["fp32", "bf16", "fp16"]
    assert found["precisions"][0]["speed_up_over_fp32"] == 1
    assert found["scaled"] == ["fp16"]
    first = {precision: losses[0] for precision, losses in found["losses"].items()}
    assert first["bf16"] == pytest.approx(first["fp32"], rel=0.05)
    assert first["fp16"] == pytest.approx(first["fp32"], rel=0.01)
    assert first["bf16"] != first["fp32"]


@pytest.mark.slow
def test_profile_and_optimise(tmp_path):
    found = executed(
        "04-profile-and-optimise",
        tmp_path,
        "{'factors': list(factors), 'slow': measured('', slow), 'workers': measured('', with_workers),"
        " 'operators': [event.key for event in operators],"
        " 'batches': [run.recipe.batch for run in (slow, with_workers, larger, both)]}",
        BATCH=4,
        STEPS=8,
        DELAY_MS=10,
    )
    slow, workers = found["slow"], found["workers"]
    # One sample after the other, so waiting is at least what they take; workers wait meanwhile.
    assert slow["data_seconds"] >= 4 * 0.010
    assert slow["data_seconds"] < slow["step_seconds"]
    assert workers["data_seconds"] < slow["data_seconds"]
    assert found["batches"] == [4, 4, 16, 16]
    assert any("conv" in name for name in found["operators"])
    assert "Self CPU" in found["text"]
    base, with_workers, larger, predicted, both = found["factors"]
    assert [row["how"] for row in found["factors"]] == ["measured", "measured", "measured", "predicted", "measured"]
    assert predicted["gain"] == pytest.approx(with_workers["gain"] * larger["gain"])
    assert base["gain"] == 1
    assert both["gain"] > 0

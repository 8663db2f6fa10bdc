"""How a script with an own loop ends: what fetches data ends with the run."""

from __future__ import annotations

import pytest
from gradus_command import Gradus, ended, python

LEFT = """\
import multiprocessing, sys
import torch
import gradus
from own import Data

how = sys.argv[1]
run = gradus.Run.start({"name": "left", "batch": 8, "steps": 6, "plan": {"workers": 2}})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
kept = run.batches(Data(200))
for x, y in kept:
    run.step(((model(x) - y) ** 2).mean())
    if how != "to the end" and run.steps_done == 2:
        break
if how == "finished":
    run.finish()
if how != "left":
    print("children", len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize("how", ["to the end", "finished", "left"])
def test_nothing_fetches_data_after_the_loop(gradus: Gradus, how: str) -> None:
    (gradus.folder / "left.py").write_text(LEFT)
    code, out, err = ended(python(gradus, "left.py", how))
    assert code == 0, err
    assert out == ("" if how == "left" else "children 0\n")
    assert err.splitlines()[-1].startswith("finished: "), err
    assert "Exception ignored" not in err

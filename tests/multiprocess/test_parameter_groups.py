"""Groups of parameters train at the rates that the recipe gives them."""

from __future__ import annotations

import torch
from pool import Pool
from user_runs import attempt, line_recipe

from gradus.checkpoint.store import CheckpointStore
from gradus.record.directory import RunDirectory


def test_a_group_moves_by_its_factor_and_one_of_zero_stays(pool: Pool, run: RunDirectory) -> None:
    def moved(bias_factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        folder = RunDirectory.create(run.path, "groups")
        groups = [{"match": ["bias"], "lr_factor": bias_factor}]
        recipe = line_recipe(
            optimizer={"use": "sgd", "lr": 0.01, "groups": groups}, steps=1, plan={"precision": "fp64"}
        )
        attempt(pool, folder, recipe, ranks=2)
        after = CheckpointStore(folder.checkpoints).open(1).tensors()
        return after["model.weight"], after["model.bias"]

    weight, start = moved(0.0)
    _, full = moved(1.0)
    other_weight, tenth = moved(0.1)
    assert torch.equal(weight, other_weight)
    assert not torch.equal(start, full)
    assert torch.allclose(tenth - start, 0.1 * (full - start), rtol=1e-9)

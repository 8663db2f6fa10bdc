"""Mistakes in loops of the user's own that the text shows for sure."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis.dead_runs import findings, of_rank, written_run

LOOP = """
sampler = DistributedSampler(data, shuffle=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, sampler=sampler):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""


def ids(folder: Path, text: str, nodes: int = 1) -> list[str]:
    logs = {f"n{node}": of_rank(node, "hello") for node in range(nodes)}
    return [one.id for one in findings(written_run(folder, state="finished", script=text, logs=logs, ranks=2))]


def test_a_loop_without_mistakes_has_none(tmp_path: Path) -> None:
    assert ids(tmp_path, LOOP) == []


def test_gradients_that_nothing_sets_back_are_told_with_the_line(tmp_path: Path) -> None:
    run = written_run(tmp_path, state="finished", script=LOOP.replace("        optimizer.zero_grad()\n", ""))
    [found] = findings(run)
    assert (found.id, found.severity, found.evidence["line"]) == ("gradients-add-up", "quality", 8)


def test_a_sampler_that_is_never_told_the_epoch_is_told_of_where_there_are_epochs(tmp_path: Path) -> None:
    text = LOOP.replace("    sampler.set_epoch(epoch)\n", "")
    assert ids(tmp_path, text) == ["sampler-without-epoch"]


@pytest.mark.parametrize(
    "text",
    [
        LOOP.replace("    sampler.set_epoch(epoch)\n", "").replace("range(3)", "range(1)"),
        LOOP.replace("    sampler.set_epoch(epoch)\n", "").replace("shuffle=True", "shuffle=False"),
    ],
)
def test_an_order_that_need_not_change_is_none(tmp_path: Path, text: str) -> None:
    assert ids(tmp_path, text) == []


def test_the_rank_within_a_node_is_a_mistake_only_on_several_nodes(tmp_path: Path) -> None:
    text = LOOP.replace("shuffle=True", 'num_replicas=4, rank=int(os.environ["LOCAL_RANK"])')
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert ids(tmp_path / "one", text) == []
    assert ids(tmp_path / "two", text, nodes=2) == ["sampler-local-rank"]

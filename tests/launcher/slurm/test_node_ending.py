"""What nodes leave behind of an attempt."""

from __future__ import annotations

from gradus.launcher.slurm.node_ending import NodeEnding, departure_of, node_endings, write_node_ending


def test_a_node_whose_word_is_cut_short_has_left_none(run):
    write_node_ending(run, 1, NodeEnding("n1", 0, 1, said={3: ["boom"]}))
    write_node_ending(run, 1, NodeEnding("n2", 1, 0))
    (run.control / "nodes" / "1" / "1.json").write_text('{"node": "n2", "num')
    assert [ending.node for ending in node_endings(run, 1)] == ["n1"]
    assert departure_of(node_endings(run, 1), 0).said == {3: ["boom"]}

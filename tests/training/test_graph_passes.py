"""Graph passes: the compiler gets them with what we compile, and remembers what it has compiled with them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from gradus.training import graph_editing
from gradus.training.graph_passes import PASSES, GraphPasses, fingerprint, with_graph_passes

SLOT = "post_grad_custom_pre_pass"


WRITTEN_IN = (*PASSES, graph_editing)  # which all of them use


@pytest.mark.parametrize("changed", range(len(WRITTEN_IN)))
def test_code_that_was_compiled_with_another_version_of_a_pass_is_not_used(changed: int, tmp_path: Path) -> None:
    copies = [tmp_path / f"{number}.py" for number in range(len(WRITTEN_IN))]
    for one, copy in zip(WRITTEN_IN, copies, strict=True):
        copy.write_text(Path(inspect.getfile(one)).read_text())
    assert fingerprint(copies) == GraphPasses().uuid()
    copies[changed].write_text(copies[changed].read_text() + "# other")
    assert fingerprint(copies) != GraphPasses().uuid()


def test_the_compiler_keeps_code_that_our_passes_have_changed() -> None:
    assert isinstance(with_graph_passes()["options"][SLOT], CustomGraphPass)


def test_options_are_equal_so_that_blocks_share_code() -> None:
    assert with_graph_passes() == with_graph_passes()


def test_other_ways_to_compile_stay_as_they_are() -> None:
    how = with_graph_passes(dynamic=False, mode="max-autotune-no-cudagraphs")
    assert how.keys() == {"dynamic", "options"}
    assert how["dynamic"] is False
    assert how["options"].items() >= {"max_autotune": True, **with_graph_passes()["options"]}.items()
    torch.compile(nn.Linear(2, 2), **how)  # which refuses a mode beside options
    assert with_graph_passes(options={"max_autotune": True})["options"].keys() == {SLOT, "max_autotune"}


def test_a_pass_that_somebody_has_for_all_code_is_not_replaced() -> None:
    with torch._inductor.config.patch({SLOT: lambda graph: None}):
        assert with_graph_passes(dynamic=False) == {"dynamic": False}


def test_a_compiler_without_such_passes_compiles_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    assert with_graph_passes(dynamic=False) == {"dynamic": False}

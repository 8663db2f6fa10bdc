"""Pickled weights: their tensors by the bare model's names, and never anything that is in them run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradus.checkpoint.pickled import read_pickled
from gradus.schema.errors import InputError

WEIGHTS = {"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}


def prefixed(prefix: str) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in WEIGHTS.items()}


CONTENTS: dict[str, Any] = {
    "a state dict": nn.Sequential(nn.Linear(3, 2)).state_dict(),
    "DDP": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "compiled DDP": prefixed("module._orig_mod."),
    "DDP, compiled": prefixed("_orig_mod.module."),
    "nested as model": {"model": WEIGHTS, "step": 3},
    "nested as state_dict": {"state_dict": prefixed("module."), "epoch": 1, "optimizer": {"state": {}}},
    "nested as model_state_dict": {"model_state_dict": WEIGHTS, "loss": 0.5},
    "nested twice": {"model": {"state_dict": WEIGHTS}},
    "with a number beside": {**WEIGHTS, "version": 2},
}


@pytest.mark.parametrize("case", CONTENTS)
def test_the_tensors_are_found_by_their_bare_names(tmp_path: Path, case: str) -> None:
    torch.save(CONTENTS[case], tmp_path / "x.pt")
    found = read_pickled(tmp_path / "x.pt")
    if case == "a state dict":
        assert found.keys() == {"0.weight", "0.bias"}
    else:
        assert found.keys() == WEIGHTS.keys()
        assert torch.equal(found["a.weight"], WEIGHTS["a.weight"])


def test_blocks_that_were_compiled_each_lose_the_mark_too(tmp_path: Path) -> None:
    torch.save({"blocks.0._orig_mod.weight": torch.ones(1), "head.weight": torch.ones(1)}, tmp_path / "x.pt")
    assert read_pickled(tmp_path / "x.pt").keys() == {"blocks.0.weight", "head.weight"}


def test_a_prefix_that_only_some_names_have_is_part_of_the_model(tmp_path: Path) -> None:
    torch.save({"module.weight": torch.ones(1), "head.weight": torch.ones(1)}, tmp_path / "x.pt")
    assert read_pickled(tmp_path / "x.pt").keys() == {"module.weight", "head.weight"}


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_a_pickle_is_refused_and_never_run(tmp_path: Path, protocol: int) -> None:
    canary = Canary(str(tmp_path / "sang"))
    torch.save({"model": {**WEIGHTS, "x": canary}}, tmp_path / "a.pt", pickle_protocol=max(2, protocol))
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"x": canary}, protocol=protocol))
    torch.save(nn.Linear(2, 2), tmp_path / "c.pt")  # a whole model: its class would have to be imported
    for name in ("a", "b", "c"):
        with pytest.raises(InputError) as caught:
            read_pickled(tmp_path / f"{name}.pt")
        assert "holds more than tensors" in caught.value.message
        assert "state_dict()" in str(caught.value.hint)
    assert not (tmp_path / "sang").exists()
    pickle.loads((tmp_path / "b.pt").read_bytes())
    assert (tmp_path / "sang").exists(), "it would have been run"


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 broken", b"\x80\x04."])
def test_what_torch_did_not_write_is_bad_input(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.pt") as caught:
        read_pickled(tmp_path / "x.pt")
    assert caught.value.details["field"] == "FILE"


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, torch.ones(3), {"optimizer": {"state": {}}}])
def test_a_file_without_named_tensors_says_what_it_has(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match="no mapping of names to tensors") as caught:
        read_pickled(tmp_path / "x.pt")
    assert "model_state_dict" in str(caught.value.hint)


def test_a_mapping_that_contains_itself_is_bad_input(tmp_path: Path) -> None:
    first: dict[str, Any] = {"epoch": 3}
    second = {"state_dict": first}
    first["model"] = second
    torch.save(first, tmp_path / "x.pt")
    with pytest.raises(InputError, match="no mapping of names to tensors"):
        read_pickled(tmp_path / "x.pt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_pickled(tmp_path / "x.pt")

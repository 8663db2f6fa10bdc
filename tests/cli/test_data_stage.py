"""`gradus data stage`: what it says, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gradus.cli.data import app
from gradus.data import staging


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(staging, "_held", [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}.bin").write_bytes(bytes(1000 + number))
    return tmp_path / "data"


def staged(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["stage", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_folder_is_staged_and_the_second_time_nothing_is_copied(folder: Path, tmp_path: Path) -> None:
    code, said = staged(str(folder), "--to", str(tmp_path / "node"), "--json")
    (first,) = json.loads(said)["staged"]
    assert (code, first["copied_bytes"], first["reused_bytes"]) == (0, 3003, 0)
    assert sorted(file.name for file in Path(first["path"]).iterdir()) == ["0.bin", "1.bin", "2.bin"]
    code, said = staged(str(folder), "--to", str(tmp_path / "node"), "--json")
    (second,) = json.loads(said)["staged"]
    assert (code, second["copied_bytes"], second["reused_bytes"]) == (0, 0, 3003)
    _, said = staged(str(folder), "--to", str(tmp_path / "node"))
    assert f"--set data.path={first['path']}" in said


def test_the_data_of_a_recipe_is_staged_to_where_it_says(tmp_path: Path) -> None:
    (tmp_path / "web.txt").write_text("of cats and dogs " * 40)
    data = {"use": "text", "path": "web.txt", "context": 8, "stage": str(tmp_path / "node")}
    optimizer = {"use": "adamw", "lr": 0.1}
    model = {"use": "gpt", "layers": 1, "width": 8, "heads": 1}
    recipe = {"name": "x", "model": model, "data": data, "batch": 4, "steps": 2, "optimizer": optimizer}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, said = staged(str(tmp_path / "recipe.yaml"))
    assert code == 0, said
    assert f"--set data.cache={tmp_path}/node" in said
    code, said = staged(str(tmp_path / "recipe.yaml"), "--to", str(tmp_path / "other"))
    assert code == 0
    assert str(tmp_path / "other") in said


def test_what_is_left_where_it_is_is_told_with_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = staged(str(folder))
    assert code == 1
    assert "neither SLURM_TMPDIR nor TMPDIR is set" in said
    monkeypatch.setenv("SLURM_TMPDIR", str(folder.parent))
    monkeypatch.setattr(staging, "_is_in_memory", lambda folder: False)
    code, said = staged(str(folder), "--to", "auto")
    assert code == 1
    assert "same disk" in said


def test_a_place_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    code, said = staged(str(tmp_path / "nothing"), "--to", str(tmp_path / "node"), "--json")
    assert code == 2
    assert "does not exist" in json.loads(said)["error"]["message"]

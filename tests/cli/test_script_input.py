"""Bad input after `--`, through the real command: what to type instead, exit code 2, and nothing on disk."""

from __future__ import annotations

from typing import Any

import pytest
from gradus_command import Gradus

CASES: list[tuple[str, list[str], dict[str, Any], str, str]] = [
    ("nothing", ["--"], {"found": "nothing"}, "nothing follows", "-- script.py"),
    ("no such script", ["--", "trian.py"], {"nearest": "train.py"}, "trian.py: no such file", ""),
    ("a folder", ["--", "pack"], {"found": "pack"}, "pack: a folder", ""),
    ("an option of gradus", ["--", "--json", "train.py"], {"found": "--json"}, "no such file", "before the --"),
    ("text", ["--", "notes.txt"], {"found": "notes.txt"}, "neither a Python file nor executable", "chmod +x notes.txt"),
    ("a recipe", ["--", "recipe.yaml"], {"found": "recipe.yaml"}, "is a recipe", "gradus train recipe.yaml"),
    ("python", ["--", "python", "train.py", "--lr", "1"], {}, "is not needed", "gradus train -- train.py --lr 1"),
    ("torchrun", ["--", "torchrun", "--nproc_per_node=2", "-m", "pack.a"], {}, "is not needed", "-- -m pack.a"),
    ("no module", ["--", "-m", "pack.b"], {"found": "pack.b"}, "there is no module pack.b", ""),
    ("no package", ["--", "-m", "nowhere.b"], {"found": "nowhere.b"}, "there is no module nowhere in", ""),
    ("-m alone", ["--", "-m"], {"found": "-m"}, "-m needs the name", "-m package.module"),
    ("a package", ["--", "-m", "pack"], {"found": "pack"}, "no __main__.py", "-m pack."),
    (
        "a recipe beside it",
        ["recipe.yaml", "--", "train.py"],
        {"field": "RECIPE"},
        "together with a script",
        "not both",
    ),
    ("--set", ["--set", "batch=3", "--", "train.py"], {"field": "--set"}, "together with a script", "own arguments"),
    ("--debug", ["--debug", "--", "train.py"], {"field": "--debug"}, "together with a script", "python -m pdb"),
    ("--dry-run", ["--dry-run", "--", "train.py"], {"field": "--dry-run"}, "together with a script", "few steps"),
    ("too many ranks", ["--nproc", "9999", "--", "train.py"], {"field": "--nproc", "found": 9999}, "9999 ranks", ""),
    ("no run", ["--resume", "nothing", "--", "train.py"], {"found": "nothing"}, "not a run", "no runs"),
    ("a script as recipe", ["train.py"], {"field": "RECIPE"}, "which is a script", "gradus train -- train.py"),
]


@pytest.fixture(scope="module")
def folder(gradus: Gradus) -> Gradus:
    gradus.recipe()
    (gradus.folder / "train.py").write_text("raise SystemExit('it ran')\n")
    (gradus.folder / "notes.txt").write_text("hello\n")
    (gradus.folder / "pack").mkdir()
    (gradus.folder / "pack" / "a.py").write_text("raise SystemExit('imported')\n")
    (gradus.folder / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    return gradus


@pytest.mark.parametrize(("words", "details", "message", "hint"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_what_to_type_instead_is_told_and_nothing_is_changed(folder, words, details, message, hint):
    before = sorted(folder.folder.rglob("*"))
    done = folder("train", "--json", *words)
    assert done.code == 2, done.err
    error = done.json["error"]
    assert message in error["message"]
    assert hint in (error["hint"] or "")
    assert {key: error.get(key) for key in details} == details
    assert sorted(folder.folder.rglob("*")) == before


def test_the_options_of_a_script_are_its_own(folder):
    """An unknown option before `--` is an error of gradus, as text: the script's --json is not ours."""
    done = folder("train", "--nope", "--", "train.py", "--json")
    assert done.code == 2
    assert "--nope" in done.err
    assert done.out == ""


def test_a_run_of_a_recipe_does_not_go_on_as_a_script(folder):
    done = folder("train", "recipe.yaml", "--run-id", "recipes", "--json")
    assert done.code == 0
    refused = folder("train", "--json", "--resume", "recipes", "--", "train.py")
    assert refused.code == 2
    assert "the run is of a recipe" in refused.json["error"]["message"]


def test_a_breakpoint_in_a_rank_of_a_recipe_is_pointed_to_debug(folder):
    (folder.folder / "stops.py").write_text(
        "from own import Model\n"
        "class Stops(Model):\n"
        "    def forward(self, x, y):\n"
        "        breakpoint()\n"
        "        return super().forward(x, y)\n"
    )
    recipe = folder.recipe("stops.yaml", model={"use": "stops.py:Stops"})
    done = folder("train", recipe, "--json", PYTHONPATH=str(folder.folder))
    assert done.code == 1
    assert "--debug" in done.json["error"]["hint"]

"""What the documents say is true: commands run, keys exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.schema.plan import Plan
from gradus.schema.recipe import (
    OPTIMIZERS,
    CheckpointBlock,
    DataBlock,
    EvaluateBlock,
    GroupBlock,
    LoraBlock,
    ModelBlock,
    OptimizerBlock,
    Recipe,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL):
            found.append((page.name, text))
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_every_command_runs(workplace: Path) -> None:
    """In the order of the pages, training cut to two steps."""
    commands = [line for _, text in blocks("bash") for line in text.splitlines() if line.startswith("gradus ")]
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        if words[0] == "train" and not {"--resume", "--"} & set(words):
            words += ["--set", "steps=2", "--set", "evaluate.batches=1"]
        done = subprocess.run(
            [sys.executable, "-m", "gradus", *words], cwd=workplace, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_python_of_the_pages_runs(workplace: Path) -> None:
    expected = {
        "README.md": "finished",
        "bring-your-own.md": "finished 2\ntensor(",
        "recipes.md": "",
        "runs.md": "torch.Size([1, 8, 256]) []",
    }
    for page, text in blocks("python"):
        checkpoint = next((str(p) for p in workplace.glob("runs/quickstart/*/checkpoints/*")), "")
        shorter = text.replace("steps=20", "steps=2").replace("CHECKPOINT", checkpoint)
        done = subprocess.run(
            [sys.executable, "-c", shorter], cwd=workplace, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}\n{done.stderr}"
        assert done.stdout.startswith(expected.pop(page))
    assert not expected


def test_the_recipe_of_the_readme_is_the_quickstart() -> None:
    import yaml

    [(_, text)] = [block for block in blocks("yaml") if block[0] == "README.md"]
    quickstart = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    assert yaml.safe_load(text) == {key: value for key, value in quickstart.items() if key in yaml.safe_load(text)}


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    models = (
        Recipe,
        ModelBlock,
        LoraBlock,
        DataBlock,
        OptimizerBlock,
        GroupBlock,
        EvaluateBlock,
        CheckpointBlock,
        Plan,
    )
    keys = {key for model in models for key in model.model_fields} | {
        key for keys in OPTIMIZERS.values() for key in keys
    }
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("recipe", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("recipes/*.yaml")))
def test_every_recipe_loads(recipe: str) -> None:
    assert Recipe.load(ROOT / recipe).name

"""Imports go one way: a package knows only those before it, and what must be quick or early never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradus

SOURCE = Path(gradus.__file__).parent

# What each package may know besides itself. `schema` is for all.
KNOWS: dict[str, set[str]] = {
    "schema": set(),
    "record": set(),
    "hardware": set(),
    "models": {"parallel"},  # which rows of a parameter a rank holds, and so draws
    "data": {"record"},  # the sample log is a file of a run
    "parallel": set(),
    # Which rows of a tensor a rank holds, and so reads or writes; what memory is left for a copy of them; that the
    # process that writes ends with the one that trains; and in its messages numbers as people read them.
    "checkpoint": {"parallel", "hardware", "faults", "record"},
    "faults": {"parallel", "record"},  # ranks agree on a stop through the world's store; the record has the request
    # Of checkpoint, the headers of pretrained weights; of record, numbers as people read them.
    "planner": {"models", "data", "parallel", "hardware", "checkpoint", "record"},
    "training": {"record", "hardware", "models", "data", "parallel", "checkpoint", "faults", "planner"},
    # Of checkpoint, what needs no torch; of data, whether a recipe asks for other samples than the run began with.
    "launcher": {"record", "hardware", "data", "planner", "faults", "checkpoint"},
    "bench": {"record", "hardware", "models", "data", "parallel", "checkpoint", "planner", "faults", "training"}
    | {"launcher", "diagnosis"},
    "diagnosis": {"record", "hardware", "planner", "launcher", "checkpoint"},  # reads what runs have left
    "cli": {"record", "hardware", "models", "data", "parallel", "checkpoint", "planner", "faults", "training"}
    | {"launcher", "bench", "diagnosis"},
}
# The few ways up, each inside a function: a cluster knows how to find itself, and what its names stand for; a profile
# traces the model, loss and data that training would build; a result builds its model and data, which needs torch,
# while launching a run must not; an own loop that nobody launched makes its own attempt.
EXCEPTIONS = {
    ("schema/cluster.py", "hardware", "detect"),
    ("schema/cluster.py", "hardware", "load"),
    ("planner/profile/of_recipe.py", "training", "_traced"),
    ("planner/profile/of_recipe.py", "training", "__init__"),
    ("training/joining.py", "launcher", "join"),
    ("training/own_loop.py", "launcher", "start"),
    ("launcher/result.py", "training", "load_model"),
    ("launcher/result.py", "training", "batch"),
}


def imports_of(path: Path) -> list[tuple[str, str | None]]:
    """The packages of gradus that a file imports, each with the innermost function that does it."""
    found: list[tuple[str, str | None]] = []

    def visit(node: ast.AST, function: str | None) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "gradus" and len(parts) > 1:
                found.append((parts[1], function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), None)
    return found


FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())


def test_every_package_has_its_rule():
    assert set(PACKAGES) == set(KNOWS)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may_know(package):
    allowed = KNOWS[package] | {package, "schema"}
    wrong = [
        f"{path.relative_to(SOURCE)} imports gradus.{imported}"
        for path in FILES
        if path.relative_to(SOURCE).parts[0] == package
        for imported, function in imports_of(path)
        if imported not in allowed and (str(path.relative_to(SOURCE)), imported, function) not in EXCEPTIONS
    ]
    assert not wrong


def test_the_rules_allow_no_more_than_is_used():
    used: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for path in FILES:
        package = path.relative_to(SOURCE).parts[0]
        if package in used:
            used[package] |= {imported for imported, _ in imports_of(path)} - {package, "schema"}
    # planner, training, launcher and cli may use everything that is below them; the rest is listed because it exists.
    for package in ("record", "hardware", "models", "data", "parallel", "checkpoint", "faults"):
        assert KNOWS[package] <= used[package], package


def loaded_after(statement: str) -> set[str]:
    """The modules that are loaded after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


LAUNCHER_MODULES = [
    ".".join(("gradus", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in sorted((SOURCE / "launcher").rglob("*.py"))
    if path.stem != "__init__"
]
CLI_MODULES = [f"gradus.cli.{path.stem}" for path in sorted((SOURCE / "cli").glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize(
    "statement",
    [
        "import gradus",
        "import gradus; gradus.Recipe, gradus.Cluster, gradus.Plan, gradus.plan, gradus.predict, gradus.train",
        f"import {', '.join(LAUNCHER_MODULES)}",
        f"import {', '.join(CLI_MODULES)}",
        "import gradus.planner.resolve, gradus.planner.defaults, gradus.planner.zero, gradus.parallel.support",
    ],
)
def test_nothing_that_starts_a_run_imports_torch(statement):
    assert "torch" not in loaded_after(statement)


def test_this_check_would_see_torch():
    assert "torch" in loaded_after("import gradus.parallel.world")


def test_import_gradus_is_light():
    loaded = loaded_after("import gradus")
    assert not {"pydantic", "yaml", "numpy", "rich", "typer"} & loaded


def test_no_package_shares_a_name_with_a_public_function():
    public = {name for name in gradus.__all__ if callable(getattr(gradus, name))}
    assert not public & set(PACKAGES)
    assert set(gradus.__all__) <= set(dir(gradus)) | set(gradus._HOMES)

"""Help is quick, and asking for it or importing gradus does not import torch."""

import subprocess
import sys

PROBE = """
import sys
def packages():
    of_python = {{*sys.stdlib_module_names, "__main__", "gradus", "typing_extensions", "cython_runtime"}}
    found = {{name.partition(".")[0] for name in sys.modules}} - of_python
    return {{name for name in found if not name.startswith("_")}}  # parts of a compiled module, and of the system
before = packages()
sys.argv = ["gradus", *{arguments!r}]
from gradus.cli.main import main
try:
    main()
finally:
    print(*sorted(packages() - before), file=sys.stderr)
"""


# What the command line is made of; and what the names of runs, plans and checkpoints are read with, which is small.
COMMAND_LINE = {"annotated_doc", "click", "markdown_it", "mdurl", "pygments", "rich", "shellingham", "typer"}
DOCUMENTS = {"annotated_types", "attr", "pydantic", "pydantic_core", "typing_inspection", "xxhash", "yaml"}


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = PROBE.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def imported(*arguments: str) -> set[str]:
    """The packages of others that a command imports."""
    return set(asked(*arguments).stderr.splitlines()[-1].split())


def imports_torch(*arguments: str) -> bool:
    return "torch" in imported(*arguments)


def test_help_imports_the_command_line_and_little_else():
    """Imports are all that takes time before help is there."""
    assert "train" in asked("--help").stdout
    assert imported("--help") <= COMMAND_LINE | DOCUMENTS


def test_help_of_every_verb_needs_no_torch():
    for verb in ((), ("plan",), ("train",), ("runs",), ("models",)):
        assert not imports_torch(*verb, "--help")


def test_listing_runs_needs_no_torch(tmp_path):
    assert not imports_torch("runs", "--runs", str(tmp_path))


def test_planning_needs_no_torch(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{name: t, model: {use: gpt}, data: {use: synthetic-tokens}, batch: 8, steps: 1, optimizer: {lr: 0.1}}"
    )
    assert not imports_torch("plan", str(recipe), "--gpus", "1x8", "--show-layout")


def test_counting_parameters_does():
    assert imports_torch("models", "--json")

"""Help is quick, and asking for it or importing gradus does not import torch."""

import subprocess
import sys
import time

PROBE = """
import sys
sys.argv = ["gradus", *{arguments!r}]
from gradus.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def test_help_answers_in_half_a_second():
    def seconds() -> float:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "gradus", "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert "train" in done.stdout
        return time.monotonic() - began

    assert min(seconds() for _ in range(3)) < 0.5


def imports_torch(*arguments: str) -> bool:
    code = PROBE.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stderr.split()[-1] == "True"


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

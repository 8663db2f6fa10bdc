"""Record the quickstart as the picture in the README: a real run, as a terminal shows it.

python docs/record_quickstart.py        # writes docs/quickstart.svg
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradus.cli.train import next_steps
from gradus.launcher.local import launch_local, prepare
from gradus.record.summary import summary_text
from gradus.schema.recipe import Recipe

HERE = Path(__file__).parent
WIDTH = 104


class Terminal(io.StringIO):
    """A stream that says it is a terminal and keeps what was written to it."""

    def isatty(self) -> bool:
        return True


def shown_lines(written: str) -> list[str]:
    """What is left on the screen: a line that was erased and drawn again counts once."""
    lines = []
    for line in re.sub(r"\x1b\[\?25[lh]", "", written).split("\n"):
        lines.append(re.split(r"\r|\x1b\[2K", line)[-1])
    return [line for line in lines if line.strip()]


def main() -> None:
    terminal = Terminal()
    recipe_path = "recipes/quickstart.yaml"
    with tempfile.TemporaryDirectory() as folder:
        launch = prepare(Recipe.load(HERE.parent / recipe_path), 2, runs=Path(folder) / "runs")
        result = launch_local(launch, stream=terminal)
        summary = summary_text(result.run, next_steps(result, recipe_path))
        text = "\n".join([*shown_lines(terminal.getvalue()), "", summary]).replace(f"{folder}/", "")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), "make run"))
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="gradus")
    # The picture must not ask a server for its font.
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    (HERE / "quickstart.svg").write_text(svg)
    print(text)


if __name__ == "__main__":
    main()

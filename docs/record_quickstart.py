"""Record the quickstart as the picture in the README: a real run in a real terminal.

python docs/record_quickstart.py        # writes docs/quickstart.svg
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH, HEIGHT = 110, 40
COMMAND = ["train", "recipes/quickstart.yaml", "--nproc", "2"]


def recorded(command: list[str], folder: str) -> str:
    """Everything that the command writes to its terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color"}
    variables.pop("CI", None)
    with subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=variables):
        os.close(slave)
        written = b""
        while chunk := _read(master):
            written += chunk
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # what Linux says when the last writer has closed a terminal
        return b""


def shown_lines(written: str) -> list[str]:
    """What is left on the screen: a line that was erased and drawn again counts once."""
    cleaned = re.sub(r"\x1b\[\?25[lh]", "", written).replace("\r\n", "\n")
    return [re.split(r"\r|\x1b\[2K", line)[-1] for line in cleaned.split("\n")]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipes").symlink_to(HERE.parent / "recipes")
        written = recorded([sys.executable, "-m", "gradus", *COMMAND], folder)
        text = "\n".join(shown_lines(written)).strip().replace(f"{folder}/", "")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), " ".join(["gradus", *COMMAND])))
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="gradus")
    # The picture must not ask a server for its font.
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    (HERE / "quickstart.svg").write_text(svg)
    print(text)


if __name__ == "__main__":
    main()

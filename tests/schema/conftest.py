from collections.abc import Callable
from pathlib import Path

import pytest

TINY = """\
name: tiny
model: {use: gpt, layers: 1, width: 16, heads: 2, context: 16}
data: {use: synthetic-tokens, samples: 64}
batch: 8
steps: 6
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., Path]:
    """A recipe file: the tiny recipe with some text replaced or added."""

    def write(replace: str = "", by: str = "", add: str = "") -> Path:
        assert replace in TINY
        path = tmp_path / "recipe.yaml"
        path.write_text((TINY.replace(replace, by) if replace else TINY) + add)
        return path

    return write

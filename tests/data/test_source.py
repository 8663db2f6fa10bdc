"""A data block is checked without torch and without loading, and mistakes are answered in the words of the recipe."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.data.source import Source, open_source, source_options
from gradus.data.sources import BUILT_IN
from gradus.schema.errors import InputError


@pytest.mark.parametrize("module", ["order", "split", "source", "sources"])
def test_the_torch_free_part_is_torch_free(module: str) -> None:
    code = f"import sys, gradus.data.{module}; assert not {{'torch', 'sklearn', 'PIL'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_opening_and_reading_a_source_needs_no_torch() -> None:
    code = (
        "import sys, numpy; from gradus.data.source import open_source\n"
        "for use, options in (('digits', {}), ('stdlib-text', {'context': 8, 'max_bytes': 1000})):\n"
        "    open_source(use, options, 'train', 1).fetch(numpy.arange(3))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("use", "options", "field", "words"),
    [
        ("minst", {}, "data.use", "did you mean 'mnist'"),
        ("digits", {"sise": 28}, "data.sise", "did you mean 'size'"),
        ("mnist", {"paht": "."}, "data.paht", "did you mean 'path'"),
        ("stdlib-text", {}, "data.context", "needs it"),
        ("stdlib-text", {"context": "256"}, "data.context", "found '256'.*integer"),
        ("stdlib-text", {"context": 0}, "data.context", "greater than or equal to 1"),
        ("stdlib-text", {"context": 8, "objective": "mask"}, "data.objective", "'next' or 'masked'"),
        ("digits", {"size": 7}, "data.size", "found 7.*greater than or equal to 8"),
        ("digits", {"channels": 2}, "data.channels", "1 or 3"),
        ("digits", {"limit": -1}, "data.limit", "found -1"),
        ("digits", {"limit": True}, "data.limit", "found True"),
        ("digits", {"validation": 1}, "data.validation", "less than 1"),
        ("tokens", {"path": 3, "context": 8}, "data.path", "found 3.*a path"),
        ("tokens", {"path": "/no/such/file", "context": 8}, "data.path", "/no/such/file does not exist"),
        ("tokens", {"path": "/", "context": 8, "dtype": "int8"}, "data.dtype", "'uint16' or 'uint32'"),
    ],
)
def test_a_mistake_is_refused_with_field_and_allowed_values(use: str, options: Any, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        source_options(use, options)
    assert caught.value.details["field"] == field
    assert caught.value.details["allowed"]
    assert caught.value.message.startswith(field)
    json.dumps(caught.value.document())
    with pytest.raises(InputError, match=words):
        open_source(use, options, "train", 1)


def test_checking_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"odd")
    source_options("tokens", {"path": str(tmp_path), "context": 8})
    source_options("mnist", {"path": str(tmp_path)})


@pytest.mark.parametrize("use", BUILT_IN)
def test_every_source_accepts_limit_and_validation(use: str) -> None:
    assert {"limit", "validation"} <= BUILT_IN[use].model_fields.keys()


@pytest.mark.parametrize("limit", [0, 1, 5, 10**9])
def test_a_limit_keeps_the_first_training_samples(limit: int) -> None:
    options = {"context": 4, "samples": 20, "limit": limit}
    if limit == 0:
        with pytest.raises(InputError, match=r"data\.limit: .*no train samples: .*20 samples.*limit 0"):
            open_source("synthetic-tokens", options, "train", 1)
    else:
        assert len(open_source("synthetic-tokens", options, "train", 1)) == min(limit, 18)
    assert len(open_source("synthetic-tokens", options, "validation", 1)) == 2


def test_nothing_held_out_is_no_validation_set() -> None:
    options = {"context": 4, "samples": 20, "validation": 0}
    assert len(open_source("synthetic-tokens", options, "train", 1)) == 20
    with pytest.raises(InputError, match=r"data\.validation: .*no validation samples"):
        open_source("synthetic-tokens", options, "validation", 1)


@pytest.fixture(params=["synthetic-tokens", "synthetic-images", "digits", "stdlib-text"])
def source(request: pytest.FixtureRequest) -> Source:
    options: dict[str, dict[str, Any]] = {
        "synthetic-tokens": {"context": 6, "samples": 30},
        "synthetic-images": {"size": 8, "samples": 30},
        "digits": {"limit": 27},
        "stdlib-text": {"context": 6, "max_bytes": 300},
    }
    return open_source(request.param, options[request.param], "train", 1)


def test_an_item_is_a_row_of_a_batch(source: Source) -> None:
    batch = source.fetch(np.arange(len(source)))
    for index in (0, len(source) - 1, -1):
        item = source[index]
        if isinstance(batch, dict) and isinstance(item, dict):
            assert all(np.array_equal(item[name], batch[name][index]) for name in batch)
        else:
            assert all(np.array_equal(value, column[index]) for value, column in zip(item, batch, strict=True))
    with pytest.raises(IndexError):
        source[len(source)]
    assert len(list(source)) == len(source)


def test_a_source_can_be_sent_to_a_worker_process(source: Source) -> None:
    copy = pickle.loads(pickle.dumps(source))
    assert str(copy.fetch(np.array([3, 1]))) == str(source.fetch(np.array([3, 1])))

"""Text sources: windows, objectives, and files that are mapped."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradus.data.source import Source, open_source
from gradus.data.sources.stdlib import read_sources
from gradus.schema.errors import InputError

CONTEXT = 8


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.bin"
    np.arange(1001, dtype=np.uint16).tofile(file)
    return file


def tokens(path: Path, split: Any = "train", seed: int = 1, **options: Any) -> Source:
    return open_source("tokens", {"path": str(path), "context": CONTEXT, **options}, split, seed)


def everything(source: Source) -> dict[str, np.ndarray]:
    batch = source.fetch(np.arange(len(source)))
    assert isinstance(batch, dict)
    return batch


def finished(source: Source, batch: Any) -> Any:
    return source.finish({name: torch.from_numpy(column) for name, column in batch.items()}, torch.float32)


def test_every_token_of_a_file_is_a_target_once(token_file: Path) -> None:
    targets = []
    for split in ("train", "validation"):
        source = tokens(token_file, split)
        windows = everything(source)["tokens"]
        assert windows.shape == (len(source), CONTEXT + 1)
        assert windows.dtype == np.uint16
        targets.append(windows[:, 1:].ravel())
    assert sorted(np.concatenate(targets)) == list(range(1, 1001))


def test_targets_are_the_tokens_that_follow(token_file: Path) -> None:
    source = tokens(token_file)
    seen = finished(source, source.fetch(np.array([3, 1])))
    assert seen["tokens"].dtype == seen["targets"].dtype == torch.int64
    assert seen["tokens"].shape == (2, *source.sample_shape)
    assert torch.equal(seen["tokens"] + 1, seen["targets"])  # the file counts up
    assert seen["tokens"][0, 0] == 3 * CONTEXT


def test_a_folder_may_bring_its_own_validation_file(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "train.bin")
    (tmp_path / "val.bin").write_bytes(np.arange(70_000, 70_050, dtype=np.uint32).tobytes())
    train, validation = (tokens(tmp_path, split, dtype="uint32") for split in ("train", "validation"))
    assert len(train) == 99 // CONTEXT
    assert everything(train)["tokens"].max() < 100
    assert everything(validation)["tokens"].min() == 70_000
    assert finished(validation, everything(validation))["tokens"].min() == 70_000


def test_a_folder_without_validation_file_is_split(tmp_path: Path) -> None:
    np.arange(1001, dtype=np.uint16).tofile(tmp_path / "train.bin")
    assert (len(tokens(tmp_path)), len(tokens(tmp_path, "validation"))) == (113, 12)


def test_a_mapped_source_travels_to_a_worker_as_a_path(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    (np.arange(10**6) % 60_000).astype(np.uint16).tofile(file)
    source = tokens(file)
    travelled = pickle.dumps(source)
    assert len(travelled) < 10_000
    assert np.array_equal(everything(pickle.loads(travelled))["tokens"], everything(source)["tokens"])


def test_a_file_that_may_exceed_memory_has_no_columns(token_file: Path) -> None:
    assert tokens(token_file).columns is None


def test_a_token_beyond_the_vocabulary_is_named_before_a_gpu_sees_it(token_file: Path) -> None:
    source = tokens(token_file, vocabulary=500)
    source.fetch(np.array([0]))
    with pytest.raises(InputError, match=r"corpus.bin has token \d+, the vocabulary is 500"):
        everything(source)


@pytest.mark.parametrize(
    ("size_bytes", "options", "message"),
    [
        (7, {}, "has 7 bytes, which is no multiple of 2"),
        (6, {"dtype": "uint32"}, "has 6 bytes, which is no multiple of 4"),
        (0, {}, "no train samples.*has 0 tokens, a window is context \\+ 1 = 9; 0 samples"),
        (16, {}, "no train samples.*has 8 tokens"),
        (1000, {"limit": 0}, "data.limit: .*no train samples.*limit 0"),
        (1000, {"objective": "masked"}, "data.vocabulary"),
        (1000, {"objective": "masked", "vocabulary": 2**16 + 1}, "data.vocabulary: .*uint16 ends at 65535"),
        (1000, {"objective": "masked", "vocabulary": 9}, "data.mask_token: .*0 to 8; found None"),
        (1000, {"objective": "masked", "vocabulary": 9, "mask_token": 9}, "data.mask_token: .*0 to 8; found 9"),
    ],
)
def test_bad_token_files_are_refused_with_numbers(tmp_path: Path, size_bytes: int, options: Any, message: str) -> None:
    file = tmp_path / "bad.bin"
    file.write_bytes(bytes(size_bytes))
    with pytest.raises(InputError, match=message):
        tokens(file, **options)


def test_a_text_of_one_window_has_nothing_to_validate_on(tmp_path: Path) -> None:
    file = tmp_path / "short.bin"
    file.write_bytes(bytes(2 * (CONTEXT + 1)))
    assert len(tokens(file)) == 1
    with pytest.raises(InputError, match=r"data\.validation: .*no validation samples.*1 samples, validation 0\.1"):
        tokens(file, "validation")


def test_a_folder_without_token_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.bin does not exist"):
        tokens(tmp_path)


# --- stdlib-text


def stdlib(split: Any = "train", seed: int = 1, **options: Any) -> Source:
    return open_source("stdlib-text", {"context": 64, "max_bytes": 200_000, **options}, split, seed)


def test_stdlib_text_is_sorted_python_without_installed_packages_and_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "data.txt", "test/t.py", "a/tests/t.py", "site-packages/p.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_sources(tmp_path, max_bytes=100) == b"a.py\0a/z.py\0b.py\0"
    assert read_sources(tmp_path, max_bytes=7) == b"a.py\0a/"


def test_stdlib_text_is_real_text_in_bytes() -> None:
    source = stdlib()
    assert (source.vocabulary, source.tokens_per_sample, source.classes) == (256, 64, None)
    assert b"import" in everything(source)["tokens"].tobytes()
    assert len(source) + len(stdlib("validation")) == 199_999 // 64


@pytest.mark.parametrize("objective", ["next", "masked"])
def test_columns_are_all_samples_of_a_small_text(objective: str) -> None:
    source = stdlib(objective=objective)
    columns = source.columns
    assert isinstance(columns, dict)
    batch = source.fetch(np.array([5, 0]))
    assert isinstance(batch, dict)
    assert columns.keys() == batch.keys()
    for name, column in columns.items():
        assert len(column) == len(source)
        assert column.dtype == batch[name].dtype
        assert np.array_equal(column[[5, 0]], batch[name])


def test_a_context_longer_than_the_text_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"has 1000 bytes .*context \+ 1 = 65537; 0 samples"):
        stdlib(context=65536, max_bytes=1000)


# --- masked


def test_masks_are_a_pure_function_of_seed_and_index() -> None:
    source, again, other = stdlib(objective="masked"), stdlib(objective="masked"), stdlib(objective="masked", seed=2)
    together, alone = source.fetch(np.array([7, 3])), again.fetch(np.array([3]))
    assert isinstance(together, dict)
    assert isinstance(alone, dict)
    assert np.array_equal(together["targets"][1], alone["targets"][0])
    assert np.array_equal(together["tokens"][1], alone["tokens"][0])
    assert not np.array_equal(everything(source)["targets"], everything(other)["targets"])


def test_masking_follows_the_80_10_10_rule() -> None:
    original = everything(stdlib())["tokens"][:, :-1]
    masked = everything(stdlib(objective="masked"))
    chosen = masked["targets"] != -100
    assert (chosen.sum(axis=1) == round(0.15 * 64)).all()
    assert np.array_equal(masked["tokens"][~chosen], original[~chosen])
    assert np.array_equal(masked["targets"][chosen], original[chosen])
    assert np.mean(masked["tokens"][chosen] == 1) == pytest.approx(0.8, abs=0.02)
    assert np.mean(masked["tokens"][chosen] == original[chosen]) == pytest.approx(0.1, abs=0.02)
    places = chosen.mean(axis=0)
    assert places.min() > 0.1
    assert places.max() < 0.2


def test_a_short_sample_still_has_a_target() -> None:
    targets = everything(stdlib(objective="masked", context=2, max_bytes=2000))["targets"]
    assert ((targets != -100).sum(axis=1) == 1).all()


def test_masked_targets_keep_their_sign_on_the_device() -> None:
    source = stdlib(objective="masked")
    seen = finished(source, source.fetch(np.arange(4)))
    assert seen["targets"].min() == -100
    assert seen["tokens"].dtype == seen["targets"].dtype == torch.int64
    assert seen["tokens"].shape == seen["targets"].shape == (4, 64)


def test_masked_token_files_use_the_mask_token_they_are_given(token_file: Path) -> None:
    masked = everything(tokens(token_file, objective="masked", vocabulary=2000, mask_token=1999))
    assert masked["targets"].dtype == np.int32
    assert (masked["tokens"] == 1999).sum() > 0

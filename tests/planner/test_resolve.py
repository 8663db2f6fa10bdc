"""A resolved recipe has nothing left open; what cannot be resolved is named with its file, field and nearest name."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.data.source import open_source
from gradus.planner.resolve import check_model_fits_data, data_options, resolved
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe


def recipe(model: dict[str, Any], data: dict[str, Any] | None = None, **more: Any) -> Recipe:
    document = {"name": "tiny", "model": model, "data": data or {"use": "synthetic-tokens"}, "batch": 8, "steps": 3}
    return Recipe.from_document({**document, "optimizer": {"lr": 0.1}, **more}, "recipe.yaml")


def refusal(of: Recipe) -> dict[str, Any]:
    with pytest.raises(InputError) as caught:
        resolved(of)
    assert caught.value.message.startswith("recipe.yaml: ")
    return {"message": caught.value.message, **caught.value.details}


def test_the_data_inherits_the_models_context_unless_it_has_its_own():
    assert resolved(recipe({"use": "gpt", "context": 48})).data.options["context"] == 48
    assert resolved(recipe({"use": "gpt2-124m"})).data.options["context"] == 1024
    own = {"use": "synthetic-tokens", "context": 16}
    assert resolved(recipe({"use": "gpt", "context": 48}, own)).data.options["context"] == 16


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        ({"use": "gpt", "vocabulary": 300}, {"use": "synthetic-tokens"}, {"context": 256, "vocabulary": 300}),
        (
            {"use": "bert", "vocabulary": 300},
            {"use": "tokens"},
            {"context": 256, "vocabulary": 300, "objective": "masked"},
        ),
        ({"use": "bert"}, {"use": "stdlib-text", "objective": "next"}, {"context": 256, "objective": "next"}),
        ({"use": "gpt", "vocabulary": 300}, {"use": "stdlib-text"}, {"context": 256}),
        ({"use": "vit", "image": 16, "channels": 1}, {"use": "synthetic-images"}, {"size": 16, "channels": 1}),
        ({"use": "resnet18", "image": 64}, {"use": "digits"}, {"size": 64, "channels": 3}),
        ({"use": "resnet18"}, {"use": "digits"}, {"channels": 3}),
        ({"use": "vit"}, {"use": "images"}, {"size": 32}),
        ({"use": "mnist-cnn"}, {"use": "digits", "size": 28}, {"size": 28}),
        (
            {"use": "vit", "image": 28, "channels": 1},
            {"use": "digits", "size": 28, "channels": 1},
            {"size": 28, "channels": 1},
        ),
        ({"use": "gpt"}, {"use": "synthetic-tokens", "vocabulary": 9}, {"context": 256, "vocabulary": 9}),
        ({"use": "gpt"}, {"use": "tokens", "vocabulary": None}, {"context": 256, "vocabulary": None}),
    ],
)
def test_the_data_inherits_what_the_recipe_does_not_say(tmp_path, model, data, expected):
    path = {"path": str(tmp_path)} if data["use"] in ("tokens", "images") else {}
    assert resolved(recipe(model, {**data, **path})).data.options == {**expected, **path}


def test_a_token_beyond_the_models_vocabulary_is_refused_by_the_source(tmp_path):
    np.arange(90, dtype=np.uint16).tofile(tmp_path / "text.bin")
    data = {"use": "tokens", "path": str(tmp_path / "text.bin"), "validation": 0}
    options = data_options(resolved(recipe({"use": "gpt", "context": 8, "vocabulary": 64}, data)))
    source = open_source("tokens", options, "train", 1)
    with pytest.raises(InputError, match="the vocabulary is 64"):
        source.fetch(np.arange(len(source)))


def test_resolving_twice_changes_nothing():
    once = resolved(recipe({"use": "gpt", "context": 48}))
    assert resolved(once) == once


@pytest.mark.parametrize(
    ("model", "data", "field", "found", "nearest"),
    [
        ({"use": "gtp"}, None, "model.use", "gtp", "gpt"),
        ({"use": "gpt", "layrs": 2}, None, "model.layrs", "layrs", "layers"),
        ({"use": "gpt", "norm": "rmsnrm"}, None, "model.norm", "rmsnrm", "rmsnorm"),
        ({"use": "gpt"}, {"use": "synthetic-token"}, "data.use", "synthetic-token", "synthetic-tokens"),
        ({"use": "gpt"}, {"use": "synthetic-tokens", "sampels": 3}, "data.sampels", "sampels", "samples"),
    ],
)
def test_a_near_miss_in_model_or_data_is_refused_with_the_nearest_name(model, data, field, found, nearest):
    error = refusal(recipe(model, data))
    assert (error["file"], error["field"], error["found"], error["nearest"]) == ("recipe.yaml", field, found, nearest)
    assert nearest in error["allowed"]


@pytest.mark.parametrize(
    ("model", "data", "field", "found"),
    [
        ({"use": "gpt", "layers": "two"}, None, "model.layers", "two"),
        ({"use": "gpt", "layers": 0}, None, "model.layers", 0),
        ({"use": "gpt", "width": 10, "heads": 4}, None, "model.heads", 4),
        ({"use": "gpt"}, {"use": "synthetic-tokens", "samples": 0}, "data.samples", 0),
        ({"use": "gpt"}, {"use": "synthetic-tokens", "samples": "many"}, "data.samples", "many"),
        ({"use": "gpt"}, {"use": "tokens", "path": "/no/such/file", "dtype": "uint16"}, "data.path", "/no/such/file"),
    ],
)
def test_a_wrong_value_in_model_or_data_is_refused(model, data, field, found):
    error = refusal(recipe(model, data))
    assert (error["field"], error["found"]) == (field, found)
    assert error["allowed"]


def test_a_missing_file_and_a_name_not_in_it_are_refused_for_every_callable(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def build_model(): ...\n")
    good = {"use": "gpt"}
    cases: list[tuple[Recipe, str]] = [
        (recipe({"use": f"{tmp_path}/mime.py:build_model"}), "model.use"),
        (recipe(good, {"use": f"{tmp_path}/mime.py:x"}), "data.use"),
        (recipe(good, loss=f"{tmp_path}/mime.py:x"), "loss"),
        (recipe(good, metrics=[f"{tmp_path}/mime.py:x"]), "metrics"),
        (recipe(good, optimizer={"lr": 1, "use": f"{tmp_path}/mime.py:x"}), "optimizer.use"),
        (recipe(good, optimizer={"lr": 1, "decay": f"{tmp_path}/mime.py:x"}), "optimizer.decay"),
    ]
    for of, field in cases:
        error = refusal(of)
        assert error["field"] == field
        assert error["nearest"] == str(path)
    error = refusal(recipe({"use": f"{path}:build_modl"}))
    assert (error["field"], error["found"], error["nearest"]) == ("model.use", "build_modl", "build_model")


def test_a_model_with_fewer_outputs_than_the_data_has_is_refused():
    with pytest.raises(InputError, match="found 256, but synthetic-tokens has 300") as caught:
        check_model_fits_data(recipe({"use": "gpt"}), vocabulary=300, classes=None)
    assert caught.value.hint == "--set model.vocabulary=300"
    check_model_fits_data(recipe({"use": "gpt", "vocabulary": 300}), vocabulary=300, classes=None)


@pytest.mark.parametrize(
    ("model", "data", "field", "message", "hint"),
    [
        (
            {"use": "mnist-cnn"},
            {"use": "digits"},
            "data.size",
            "digits has size 8, but mnist-cnn reads 28 x 28",
            "--set data.size=28",
        ),
        (
            {"use": "mnist-cnn"},
            {"use": "digits", "size": 28, "channels": 3},
            "data.channels",
            "digits has channels 3, but mnist-cnn reads 1",
            "--set data.channels=1",
        ),
        (
            {"use": "vit", "image": 64},
            {"use": "cifar10", "path": "."},
            "data.use",
            "cifar10 has size 32, but vit reads 64 x 64",
            "--set model.image=32",
        ),
        (
            {"use": "gpt", "context": 64},
            {"use": "synthetic-tokens", "context": 65},
            "data.context",
            "synthetic-tokens has context 65, but model.context is 64",
            "--set data.context=64",
        ),
        (
            {"use": "gpt"},
            {"use": "digits"},
            "data.use",
            "gpt learns from text, but digits has images",
            "sources of text",
        ),
        (
            {"use": "resnet18"},
            {"use": "stdlib-text", "context": 8},
            "data.use",
            "resnet18 learns from images",
            "digits",
        ),
    ],
)
def test_samples_that_a_reference_model_cannot_take_are_refused_with_the_numbers(model, data, field, message, hint):
    with pytest.raises(InputError, match=message) as caught:
        resolved(recipe(model, data))
    assert caught.value.details["field"] == field
    assert hint in caught.value.hint


def test_the_size_of_mnist_is_read_from_its_header(tmp_path):
    data = {"use": "mnist", "path": str(tmp_path)}
    resolved(recipe({"use": "mnist-cnn"}, data))  # nothing there yet: opening says so
    header = bytes([0, 0, 8, 3]) + np.array([5, 20, 20], ">u4").tobytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(5 * 400)))
    assert refusal(recipe({"use": "mnist-cnn"}, data))["found"] == 20
    with pytest.raises(InputError, match="mnist has channels 1, but simple-cnn reads 3") as caught:
        resolved(recipe({"use": "simple-cnn"}, data))
    assert caught.value.hint == "--set model.channels=1"


def test_a_reference_model_knows_the_tokens_of_its_data_unless_the_recipe_says_more(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    data = {"use": "text", "path": str(tmp_path / "a.txt"), "tokenizer": {"train": "bpe", "vocabulary": 500}}
    once = resolved(recipe({"use": "gpt"}, data))
    assert once.model.options["vocabulary"] == 500
    assert resolved(once) == once
    assert resolved(recipe({"use": "gpt", "vocabulary": 512}, data)).model.options["vocabulary"] == 512
    assert "vocabulary" not in resolved(recipe({"use": "gpt2-124m"}, data)).model.options
    error = refusal(recipe({"use": "gpt", "vocabulary": 499}, data))
    assert (error["field"], error["found"]) == ("model.vocabulary", 499)


def test_files_of_a_data_block_are_found_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "tok").mkdir()
    monkeypatch.chdir("/")
    document = {"name": "tiny", "model": {"use": "gpt"}, "batch": 8, "steps": 3, "optimizer": {"lr": 0.1}}
    data = {"use": "text", "path": "texts/*.jsonl", "tokenizer": "tok", "cache": "kept", "template": "tokenizer"}
    found = Recipe.from_document({**document, "data": data}, folder=tmp_path).data.options
    assert found["path"] == f"{tmp_path}/texts/*.jsonl"
    assert (found["tokenizer"], found["cache"], found["template"]) == (f"{tmp_path}/tok", "/kept", "tokenizer")
    bytes_ = {"use": "text", "path": "texts", "tokenizer": "bytes"}
    assert Recipe.from_document({**document, "data": bytes_}, folder=tmp_path).data.options["tokenizer"] == "bytes"

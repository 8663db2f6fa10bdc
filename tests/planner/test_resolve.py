"""A resolved recipe has nothing left open; what cannot be resolved is named with its file, field and nearest name."""

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
        ({"use": "mnist-cnn"}, {"use": "digits"}, {}),
        ({"use": "vit"}, {"use": "digits", "size": 28, "channels": 1}, {"size": 28, "channels": 1}),
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

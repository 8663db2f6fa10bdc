"""Building: the user's own models and datasets, and mistakes in them told as the user's, with file and line."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from pathlib import Path
from typing import Any

import huggingface_cases
import pytest
import torch
import yaml
from torch import Tensor, nn
from training_cases import recipe_for

from gradus.data.loader import Indexed
from gradus.data.orders import lengths_of
from gradus.models import initialise
from gradus.planner.resolve import resolved
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.building import build_model, finished_model, open_data

CPU = torch.device("cpu")
MODELS = """\
import torch
from torch import nn


def build(width=4):
    return nn.Linear(width, 2)


def raises(width=4):
    size = width + "1"
    return nn.Linear(size, 2)


def raises_inside_torch():
    return nn.Conv2d(3, 8, kernel_size=3, groups=5)


def text():
    return "a model"
"""
DATA = """\
import numpy as np
import torch


class Numbers:
    def __init__(self, first, length):
        self.first, self.length = first, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([float(self.first + index)]), torch.tensor(0)


class Endless:
    def __getitem__(self, index):
        return torch.zeros(1), torch.zeros(1)


def pair(length=10):
    return Numbers(0, length), Numbers(1000, 5)


def by_split(split, length=10):
    return Numbers(0 if split == "train" else 1000, length)


def single(length=10):
    return Numbers(0, length)


def train_only(length=10):
    return Numbers(0, length), None


def endless():
    return Endless()


def endless_validation():
    return Numbers(0, 10), Endless()


def empty():
    return Numbers(0, 0), Numbers(0, 0)


def scalars():
    return [1.0, 2.0, 3.0]


def dicts():
    return [{"x": torch.tensor(float(i)), "name": f"item {i}"} for i in range(10)]


def collated():
    data = Numbers(0, 10)
    data.collate = lambda items: (torch.stack([x for x, _ in items]) * 100, torch.zeros(len(items)))
    return data


def raises(length=10):
    table = {}
    return table["missing"]
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


def recipe(folder: Path, model: Any = "build", data: Any = "single") -> Recipe:
    def block(file: str, named: Any) -> dict[str, Any]:
        named = {"use": named} if isinstance(named, str) else named
        return {**named, "use": f"{file}:{named['use']}"}

    document = {
        "name": "t",
        "model": block("models.py", model),
        "data": block("data.py", data),
        "batch": 2,
        "steps": 1,
        "optimizer": {"lr": 0.1},
    }
    return resolved(Recipe.from_document(document, folder=folder))


def samples(data: Indexed | None) -> list[float]:
    assert data is not None
    return [data.dataset[index][0].item() for index in range(data.length)]


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), start=1) if text in line)


def test_a_users_model_is_built_with_its_keys(files: Path) -> None:
    model = build_model(recipe(files, {"use": "build", "width": 7}), CPU, torch.float32)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 7


def test_a_users_model_is_in_fp64_where_the_plan_says_so(files: Path) -> None:
    assert build_model(recipe(files), CPU, torch.float64).weight.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("lora", [False, True])
def test_a_base_of_adapters_is_drawn_on_the_host_whatever_it_is_trained_on(
    monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    devices: list[torch.device | None] = []
    draw = initialise.draw

    def watched(tensor: Tensor, name: str, *rest: Any, drawn_on: torch.device | None, **options: Any) -> None:
        devices.append(drawn_on)
        draw(tensor, name, *rest, drawn_on=drawn_on, **options)

    monkeypatch.setattr(initialise, "draw", watched)
    changes: dict[str, Any] = {"lora": {"rank": 2}} if lora else {}
    model = build_model(recipe_for("gpt", **changes), CPU, torch.float64)
    assert set(devices[-4:]) == {CPU if lora else None}, "None is wherever the weights are"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}


def test_every_rank_and_attempt_starts_from_the_same_weights(files: Path) -> None:
    first = build_model(recipe(files), CPU, torch.float32)
    torch.rand(5)
    second = build_model(recipe(files), CPU, torch.float32)
    assert torch.equal(first.weight, second.weight)  # type: ignore[arg-type]


def test_a_model_that_raises_is_told_with_its_file_and_line(files: Path) -> None:
    with pytest.raises(InputError, match=r"model\.use: .*models\.py:raises raised TypeError: unsupported") as caught:
        build_model(recipe(files, "raises"), CPU, torch.float32)
    line = line_of(files / "models.py", 'size = width + "1"')
    assert f"{files / 'models.py'}, line {line}: size = width" in str(caught.value.hint)
    assert "Traceback" in caught.value.details["traceback"]
    assert torch.get_default_dtype() == torch.float32


def test_an_error_inside_a_library_is_told_at_the_users_own_line(files: Path) -> None:
    with pytest.raises(InputError, match="raised ValueError: in_channels must be divisible by groups") as caught:
        build_model(recipe(files, "raises_inside_torch"), CPU, torch.float32)
    line = line_of(files / "models.py", "nn.Conv2d")
    assert f"{files / 'models.py'}, line {line}: return nn.Conv2d" in str(caught.value.hint)


def test_the_users_line_is_found_also_in_a_folder_named_gradus(tmp_path: Path) -> None:
    folder = tmp_path / "gradus" / "mine"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODELS)
    (folder / "data.py").write_text(DATA)
    with pytest.raises(InputError) as caught:
        build_model(recipe(folder, "raises_inside_torch"), CPU, torch.float32)
    assert str(folder / "models.py") in str(caught.value.hint)


def test_an_unknown_key_of_a_users_model_is_bad_input(files: Path) -> None:
    with pytest.raises(InputError, match=r"model.wdith: unknown key .* 'wdith'; did you mean 'width'"):
        build_model(recipe(files, {"use": "build", "wdith": 7}), CPU, torch.float32)


def test_a_model_that_is_no_module_is_refused(files: Path) -> None:
    with pytest.raises(InputError, match=r"returned str, allowed: a torch\.nn\.Module"):
        build_model(recipe(files, "text"), CPU, torch.float32)


def test_a_pair_is_training_and_validation(files: Path) -> None:
    pair = recipe(files, data="pair")
    assert samples(open_data(pair, "train")) == list(range(10))
    assert samples(open_data(pair, "validation")) == list(range(1000, 1005))


def test_a_function_with_a_split_parameter_is_asked_for_each(files: Path) -> None:
    asked = recipe(files, data={"use": "by_split", "length": 3})
    assert samples(open_data(asked, "train")) == [0, 1, 2]
    assert samples(open_data(asked, "validation")) == [1000, 1001, 1002]


@pytest.mark.parametrize(("fraction", "held"), [(None, 2), (0.25, 5), (0, 0)])
def test_of_a_single_dataset_a_part_is_held_out(files: Path, fraction: float | None, held: int) -> None:
    options = {"use": "single", "length": 20} | ({} if fraction is None else {"validation": fraction})
    train = samples(open_data(recipe(files, data=options), "train"))
    validation = open_data(recipe(files, data=options), "validation")
    held_out = samples(validation) if validation is not None else []
    assert len(held_out) == held
    assert sorted(train + held_out) == list(range(20))


def test_a_pair_may_have_no_validation(files: Path) -> None:
    assert open_data(recipe(files, data="train_only"), "validation") is None


@pytest.mark.parametrize("use", ["single", "pair", "by_split"])
def test_a_limit_cuts_training_and_leaves_validation_whole(files: Path, use: str) -> None:
    whole, limited = recipe(files, data=use), recipe(files, data={"use": use, "limit": 3})
    few = samples(open_data(limited, "train"))
    assert len(few) == 3
    assert set(few) < set(samples(open_data(whole, "train"))), "from anywhere among them"
    assert samples(open_data(limited, "validation")) == samples(open_data(whole, "validation"))


def test_an_empty_dataset_is_refused(files: Path) -> None:
    with pytest.raises(InputError, match="length 0"):
        open_data(recipe(files, data="empty"), "train")


@pytest.mark.parametrize(
    ("use", "split"), [("endless", "train"), ("endless", "validation"), ("endless_validation", "validation")]
)
def test_a_dataset_without_a_length_is_refused(files: Path, use: str, split: Any) -> None:
    with pytest.raises(InputError, match=r"Endless has no length, allowed: a dataset with __len__ and __getitem__"):
        open_data(recipe(files, data=use), split)


def test_data_that_raises_is_told_with_its_file_and_line(files: Path) -> None:
    with pytest.raises(InputError, match=r"data\.use: .*data\.py:raises raised KeyError: 'missing'") as caught:
        open_data(recipe(files, data="raises"), "train")
    line = line_of(files / "data.py", 'table["missing"]')
    assert f"{files / 'data.py'}, line {line}" in str(caught.value.hint)


def test_a_data_file_that_raises_while_it_is_imported_is_told_with_its_line(files: Path) -> None:
    (files / "data.py").write_text("import a_module_that_is_not_there\n\ndef single():\n    return []\n")
    with pytest.raises(InputError, match=r"data\.use: .* raised ModuleNotFoundError") as caught:
        open_data(recipe(files), "train")
    assert f"{files / 'data.py'}, line 1" in str(caught.value.hint)


def test_items_that_are_neither_dict_nor_tuple_are_refused(files: Path) -> None:
    data = open_data(recipe(files, data="scalars"), "train")
    assert data is not None
    with pytest.raises(InputError, match="item 0 is float, allowed: a dict or a tuple") as caught:
        data.fetch(torch.arange(2).numpy())
    assert "(input, target)" in str(caught.value.hint)


def test_dicts_are_collated_by_key(files: Path) -> None:
    data = open_data(recipe(files, data={"use": "dicts", "validation": 0}), "train")
    assert data is not None
    batch = data.fetch(torch.arange(3).numpy())
    assert batch["x"].shape == (3,)
    assert len(batch["name"]) == 3


@pytest.mark.parametrize("limit", [None, 4])
def test_a_datasets_own_collate_is_used_also_for_a_part_of_it(files: Path, limit: int | None) -> None:
    data = open_data(recipe(files, data={"use": "collated", "limit": limit}), "train")
    assert data is not None
    images, _ = data.fetch(torch.arange(2).numpy())
    assert images[:, 0].tolist() == [100 * value for value in samples(data)[:2]]


def test_a_new_head_is_trained_beside_adapters() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    recipe = Recipe.from_document(
        {
            "name": "t",
            "model": {"use": "own", "weights_skip": ["head.*"]},
            "lora": {"rank": 2, "targets": ["body"]},
            "batch": 1,
            "steps": 1,
        }
    )
    finished_model(recipe, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"body.lora_a", "body.lora_b", "head.weight", "head.bias"}


def from_folder(path: Path, **model: Any) -> Recipe:
    return Recipe.from_document(
        {"name": "t", "batch": 2, "steps": 1, "optimizer": {"lr": 0.1}, "data": {"use": "synthetic-tokens"}}
        | {"model": {"use": "huggingface", "path": str(path), **model}}
    )


def test_a_task_that_the_folder_is_not_of_does_not_start_a_new_head_in_silence(tmp_path: Path) -> None:
    huggingface_cases.bert().save_pretrained(tmp_path)
    classifying = {"task": "sequence-classification"}
    with pytest.raises(InputError, match=r"is of task masked-lm, and lacks weights that sequence-cl") as caught:
        build_model(from_folder(tmp_path, **classifying), CPU, torch.float32)
    error = caught.value
    head = ["classifier.bias", "classifier.weight"]
    assert error.details["missing"] == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", *head]
    assert all(name in str(error) for name in head)
    # What the hint says is what helps.
    change = shlex.split(str(error.hint)[str(error.hint).index("--set") :])[1]
    skip = yaml.safe_load(change.partition("=")[2])
    assert skip == ["bert.pooler.*", "classifier.*"]
    model = build_model(from_folder(tmp_path, **classifying, weights_skip=skip), CPU, torch.float32)
    assert type(model).__name__ == "BertForSequenceClassification"
    with pytest.raises(InputError, match=r"\(2\): classifier.bias, classifier.weight"):
        build_model(from_folder(tmp_path, **classifying, weights_skip=["bert.pooler.*"]), CPU, torch.float32)
    # A checkpoint that follows has all of them.
    build_model(from_folder(tmp_path, **classifying), CPU, torch.float32, load_weights=False)


def test_a_pattern_for_new_weights_that_the_folder_has_is_refused(tmp_path: Path) -> None:
    huggingface_cases.bert("BertForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'classifier.\*' names nothing that .* lacks"):
        build_model(from_folder(tmp_path, weights_skip=["classifier.*"]), CPU, torch.float32)
    for skip in ([], ["classifier.*"]):  # other classes are a new head that was asked for
        build_model(from_folder(tmp_path, classes=7, weights_skip=skip), CPU, torch.float32)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "bart", "vit"])
def test_a_folder_as_transformers_writes_it_lacks_nothing(kind: str, tmp_path: Path) -> None:
    """Tied weights are written once, and positions that are only counted not at all."""
    getattr(huggingface_cases, kind)().save_pretrained(tmp_path)
    build_model(from_folder(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("count", [295, 301])
def test_lengths_that_are_not_of_all_samples_are_refused_also_for_a_part(files: Path, count: int) -> None:
    with (files / "data.py").open("a") as file:
        body = f"    data = Numbers(0, 300)\n    data.lengths = [1] * {count}\n    return data\n"
        file.write(f"\ndef measured():\n{body}")
    with pytest.raises(InputError, match=f"data.use: `lengths` has {count} entries, the dataset has 300 samples"):
        open_data(recipe(files, data="measured"), "train")


def test_a_dataset_of_which_a_part_is_held_out_is_called_by_its_own_name(files: Path) -> None:
    grouped = recipe(files, data={"use": "single", "group_by_length": 2})
    data = open_data(grouped, "train")
    assert data is not None
    with pytest.raises(InputError, match="Numbers does not say how long its samples are"):
        lengths_of(data, grouped.data)

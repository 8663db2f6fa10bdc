"""The catalogue finds models by name, counts them exactly, and refuses what it cannot build with a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from counted_work import RealNumbers

from gradus.models import catalogue
from gradus.models.settings import GPTSettings, ResNetSettings
from gradus.schema.errors import InputError


def gpt_parameters(layers: int, width: int, context: int, vocabulary: int) -> int:
    """GPT-2's count by hand: tied tables, biases everywhere but in the output, two norms a block and one at the end."""
    block = 12 * width**2 + 13 * width
    return vocabulary * width + context * width + layers * block + 2 * width


PARAMETERS = {
    "simple-cnn": 2_474_506,
    "mnist-cnn": 1_199_882,
    "resnet": 11_689_512,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vit-b16": 86_567_656,
    "gpt": gpt_parameters(4, 128, 256, 256),
    "gpt2-124m": gpt_parameters(12, 768, 1024, 50_304),
    "gpt-1.3b": gpt_parameters(24, 2048, 2048, 50_304),
    "gpt3-175b": gpt_parameters(96, 12_288, 2048, 50_257),
    "llama-8b": 8_030_261_248,
    "bert-2.5b": 2_472_627_289,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    entry = next(entry for entry in catalogue.entries() if entry.name == name)
    assert entry.describe()["parameters"] == parameters


def test_the_padded_gpt2_has_47_rows_more_than_the_published_one() -> None:
    with torch.device("meta"):
        model = catalogue.build("gpt2-124m", {"vocabulary": 50_257})
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_every_reference_and_preset_describes_itself() -> None:
    documents = [entry.describe() for entry in catalogue.entries()]
    assert len({document["name"] for document in documents}) == len(documents)
    for document in documents:
        assert isinstance(document["parameters"], int)
        assert document["reference"] in catalogue.REFERENCES
    assert {document["name"] for document in documents if document["kind"] == "reference"} == set(catalogue.REFERENCES)


def test_counting_175_billion_parameters_makes_none_of_them() -> None:
    entry = next(entry for entry in catalogue.entries() if entry.name == "gpt3-175b")
    with RealNumbers() as made:
        entry.describe()
    assert made.bytes == 0
    assert made.operators < 3000  # of 96 layers: 2,313 in November 2026


def test_checking_a_recipe_does_not_import_torch() -> None:
    code = """
import sys
from gradus.models import catalogue
catalogue.resolve("gpt2-124m", {"layers": 2})
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_go_before_those_of_a_preset() -> None:
    reference, settings = catalogue.resolve("resnet50", {"classes": 10, "small_input": True})
    assert reference.name == "resnet"
    assert settings == ResNetSettings(depth=50, classes=10, small_input=True)


def test_the_ambient_dtype_is_used() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = catalogue.build("gpt", {"layers": 1, "positions": "rotary"})
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float64}


def test_an_unknown_model_suggests_the_nearest_and_an_own_file() -> None:
    with pytest.raises(InputError, match="did you mean 'resnet50'") as error:
        catalogue.resolve("resnet-50", {})
    assert error.value.details["field"] == "model.use"
    assert "file.py:build" in str(error.value.hint)


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(InputError) as error:
        catalogue.resolve("gpt", {"layer": 4})
    assert error.value.details["field"] == "model.layer"
    assert error.value.details["nearest"] == "layers"


@pytest.mark.parametrize(
    ("use", "options", "field", "in_message"),
    [
        ("gpt", {"layers": "4"}, "model.layers", "'4' (str). Allowed: int"),
        ("gpt", {"layers": True}, "model.layers", "True (bool). Allowed: int"),
        ("gpt", {"layers": 4.0}, "model.layers", "4.0 (float). Allowed: int"),
        ("gpt", {"layers": 0}, "model.layers", "0 (int). Allowed: at least 1"),
        ("gpt", {"layers": None}, "model.layers", "None"),
        ("gpt", {"kv_heads": "2"}, "model.kv_heads", "int or null"),
        ("gpt", {"tied": 1}, "model.tied", "1 (int). Allowed: bool"),
        ("gpt", {"dropout": 1.0}, "model.dropout", "at least 0 and below 1"),
        ("gpt", {"dropout": float("nan")}, "model.dropout", "nan"),
        ("gpt", {"width": 100, "heads": 7}, "model.heads", "a divisor of width (100): 1, 2, 4, 5, 10, 20, 25, 50, 100"),
        ("gpt", {"kv_heads": 3}, "model.kv_heads", "a divisor of heads (4): 1, 2, 4"),
        ("gpt", {"norm": "layernrm"}, "model.norm", "did you mean 'layernorm'"),
        ("gpt", {"norm": 3}, "model.norm", "'layernorm' or 'rmsnorm'"),
        ("gpt", {"positions": "rotary", "width": 12, "heads": 4}, "model.heads", "12 / 4 = 3 is odd"),
        ("resnet", {"depth": 20}, "model.depth", "18 or 34 or 50 or 101"),
        ("resnet", {"image": -1}, "model.image", "at least 1"),
        ("vit", {"image": 30, "patch": 4}, "model.patch", "a divisor of image (30)"),
        ("bert", {"heads": 5}, "model.heads", "a divisor of width (128)"),
        ("bert", {"position_offset": -1}, "model.position_offset", "at least 0"),
    ],
)
def test_bad_settings_name_the_field_and_the_numbers(
    use: str, options: dict[str, object], field: str, in_message: str
) -> None:
    with pytest.raises(InputError) as error:
        catalogue.resolve(use, options)
    assert error.value.details["field"] == field
    assert "allowed" in error.value.details
    assert in_message in error.value.message


def test_an_integer_will_do_for_a_float() -> None:
    _, settings = catalogue.resolve("gpt", {"rotary_base": 500_000, "dropout": 0})
    assert settings == GPTSettings(rotary_base=500_000.0, dropout=0.0)
    assert isinstance(settings.rotary_base, float)


def test_swiglu_keeps_the_size_of_a_gelu_mlp_in_multiples_of_64() -> None:
    assert GPTSettings(width=768, heads=12, activation="swiglu").inner_width == 2048
    assert GPTSettings(width=128, activation="swiglu").inner_width == 384
    assert GPTSettings(width=768, heads=12).inner_width == 3072

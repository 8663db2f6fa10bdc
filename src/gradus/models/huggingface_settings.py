"""What `model: {use: huggingface}` is built from, read from the recipe or a folder. Imports neither torch nor
transformers, so that a launcher can check a recipe."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gradus.models.settings import Settings, refused
from gradus.schema.errors import InputError, nearest, unknown_name

INSTALL = 'pip install "gradus[huggingface]"'

# What a model may be for, and the ends of the names of the classes that do it.
TASKS = {
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
    "seq2seq-lm": ("ForConditionalGeneration", "MTModel"),
    "sequence-classification": ("ForSequenceClassification",),
    "image-classification": ("ForImageClassification",),
}
# Our names, which data inherits, and those that configurations have for them, the usual one first.
COUNTERPARTS = {
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "image": ("image_size",),
    "channels": ("num_channels",),
    "classes": ("num_labels",),
}
CLASSES_BY_DEFAULT = 2
# They number positions from the padding token on, so that the table has two rows more than there are positions.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "longformer", "roberta-prelayernorm")
_WITHOUT_LIMIT = ("t5", "mt5", "umt5", "longt5", "bloom", "mpt")  # relative positions: any length will do


@dataclass(frozen=True)
class HuggingFaceSettings(Settings):
    """A folder with weights, or a configuration for new ones. The other settings are the configuration's own where
    the recipe does not give them."""

    path: str | None = None  # a folder with config.json and safetensors
    config: dict[str, Any] | None = None  # model_type and its own keys, as in a config.json
    task: str | None = None
    vocabulary: int | None = None
    context: int | None = None
    image: int | None = None
    channels: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        for name, expected in (("path", str), ("config", dict), ("task", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, expected):
                raise refused(name, value, "a mapping" if expected is dict else "a text")
        if (self.path is None) == (self.config is None):
            raise InputError(
                f"model: found {'both' if self.path else 'neither'} path and config. Allowed: one of them",
                hint="path: a folder that save_pretrained wrote; config: {model_type: llama, hidden_size: 64, ...}",
                field="model",
            )
        installed = _model_types()
        document = self.config if self.config is not None else read_config(Path(str(self.path)))
        kind = document.get("model_type")
        where = "model.config.model_type" if self.config is not None else "model.path"
        if not isinstance(kind, str):
            raise InputError(f"{where}: no model_type", hint="such as llama, gpt2, bert, t5 or vit", field=where)
        if installed and kind not in installed:
            close = nearest(kind, installed)
            raise InputError(
                f"{where}: unknown model_type {kind!r}" + (f"; did you mean {close!r}?" if close else ""),
                hint=f"the transformers installed here knows {len(installed)} others; a newer one may know this",
                field=where,
                found=kind,
                nearest=close,
            )
        self._complete(document)

    def _complete(self, document: Mapping[str, Any]) -> None:
        """Check the settings against the configuration, and take from it those that are not given."""
        task = self.task or task_of(document.get("architectures") or ())
        if task is None:
            found = ", ".join(document.get("architectures") or ()) or "nothing"
            raise InputError(
                f"model.task: missing; the architecture in the configuration is {found}",
                hint="say what the model is for",
                field="model.task",
                allowed=list(TASKS),
            )
        if task not in TASKS:
            raise unknown_name("task", task, TASKS, field="model.task")
        object.__setattr__(self, "task", task)
        for name in COUNTERPARTS:
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise refused(name, given, "a whole number of at least 1")
            own = from_config(document, name)
            if given is not None and self.path is not None and name != "classes" and own is not None and given != own:
                raise InputError(
                    f"model.{name}: found {given}, but the weights in {self.path} are for {own}",
                    field=f"model.{name}",
                    found=given,
                    allowed=own,
                )
            if given is None and (name != "classes" or task.endswith("classification")):
                object.__setattr__(self, name, own)

    @property
    def changes(self) -> dict[str, int]:
        """Keys of the configuration that the recipe sets by our names."""
        document = self.config if self.config is not None else read_config(Path(str(self.path)))
        given = {name: getattr(self, name) for name in COUNTERPARTS}
        return {
            next((key for key in COUNTERPARTS[name] if key in document), COUNTERPARTS[name][0]): value
            + (_offset(document) if name == "context" else 0)
            for name, value in given.items()
            if value is not None and value != from_config(document, name)
        }


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    if not folder.is_dir():
        raise InputError(
            f"model.path: {folder} is no folder",
            hint="nothing is downloaded: copy the model here first, as save_pretrained or its repository has it",
            field="model.path",
            found=str(folder),
            allowed="a folder with config.json",
        )
    file = folder / "config.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        names = sorted(path.name for path in folder.iterdir())[:10]
        raise InputError(
            f"model.path: {folder} has no config.json; it has {', '.join(names) or 'nothing'}",
            field="model.path",
            found=str(folder),
            allowed="a folder with config.json",
        ) from None
    except ValueError as error:
        raise InputError(f"model.path: {file} is not valid JSON: {error}", field="model.path") from None
    if not isinstance(document, dict):
        raise InputError(f"model.path: {file} holds no mapping", field="model.path")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"model.path: {folder} has no weights in safetensors",
            hint="save them with save_pretrained, or give the content of config.json as model.config to start anew",
            field="model.path",
            found=str(folder),
            allowed="model.safetensors",
        )
    return document


def task_of(architectures: Iterable[str]) -> str | None:
    """What a model is for, by the name of its class."""
    for name in architectures:
        for task, endings in TASKS.items():
            if name.endswith(endings):
                return task
    return None


def from_config(document: Mapping[str, Any], name: str) -> int | None:
    """One of our settings as a configuration has it; None if it leaves it to the defaults of its kind."""
    if name == "context" and document.get("model_type") in _WITHOUT_LIMIT:
        return None
    if name == "classes" and "num_labels" not in document:  # what all configurations have in common
        labels = document.get("id2label")
        return len(labels) if isinstance(labels, dict) else CLASSES_BY_DEFAULT
    value = next((document[key] for key in COUNTERPARTS[name] if key in document), None)
    if not isinstance(value, int):
        return None
    return value - _offset(document) if name == "context" else value


def _offset(document: Mapping[str, Any]) -> int:
    return int(document.get("pad_token_id") or 1) + 1 if document.get("model_type") in _OFFSET_POSITIONS else 0


@cache
def _model_types() -> frozenset[str]:
    """The kinds of model that the installed transformers knows, read from its source: importing it imports torch."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise InputError(
            "model.use: huggingface needs the package transformers",
            hint=INSTALL,
            field="model.use",
            found="huggingface",
        )
    names: set[str] = set()
    for file in ("auto_mappings.py", "configuration_auto.py"):
        path = Path(spec.origin).parent / "models" / "auto" / file
        if path.exists():
            names |= _keys_of("CONFIG_MAPPING_NAMES", ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(names)


def _keys_of(variable: str, tree: ast.Module) -> set[str]:
    """The keys of a mapping that a module writes down as pairs or as a dict."""
    keys: list[ast.expr | None] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == variable for t in node.targets):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Tuple) and len(part.elts) == 2:
                    keys.append(part.elts[0])
                elif isinstance(part, ast.Dict):
                    keys += part.keys
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}

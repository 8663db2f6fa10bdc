"""`model: {use: huggingface}`: a model of `transformers` that takes what gradus's own data sources give.

The model stays what it is, an instance of a class derived from its own: the names of its parameters are those that
`from_pretrained` expects, and `generate` and `save_pretrained` work.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradus.models.huggingface_documents import keywords_for
from gradus.models.huggingface_settings import HuggingFaceSettings, read_config, task_of
from gradus.models.layers import require_length
from gradus.models.output import classification_loss
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.patterns import NAMES_SHOWN

_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class NewWeights:
    """What a folder did not have for the model that was built from it."""

    folder: str
    task: str
    missing: tuple[str, ...]
    reshaped: tuple[str, ...]  # a head for another number of classes, which the recipe asks for


def build(settings: HuggingFaceSettings) -> nn.Module:
    """The model that the settings describe: new weights for a configuration, those of the folder for a path."""
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()  # every rank would draw its own
    automatic = getattr(transformers, _AUTO_CLASSES[str(settings.task)])
    try:
        if settings.path is not None and torch.get_default_device().type == "meta":  # its shape, without its weights
            changed = {"local_files_only": True, "trust_remote_code": False, **settings.changes}
            config = transformers.AutoConfig.from_pretrained(settings.path, **changed)
            model = automatic.from_config(config, trust_remote_code=False)
        elif settings.path is not None:
            model = _from_folder(automatic, settings)
        else:
            model = automatic.from_config(_configuration(transformers, settings), trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # transformers raises every kind of exception for bad settings
        field = "model.path" if settings.path is not None else "model.config"
        raise InputError(
            f"{field}: transformers refused it: {_first_sentences(error)}",
            hint=f"is `task: {settings.task}` what this kind of model does?",
            field=field,
        ) from error
    return adapted(model.train(), settings.context)


def adapted(model: nn.Module, context: int | None = None) -> nn.Module:
    """The same model, taking `tokens` and `targets`, or images and labels, as well as its own keys."""
    kind: Any = type(model)
    model.__class__ = _derived(kind)
    model.gradus_context = context  # type: ignore[assignment]
    return model


def _from_folder(automatic: Any, settings: HuggingFaceSettings) -> nn.Module:
    """Never from the network, and neither pickled weights nor code that lies in the folder."""
    changes: dict[str, Any] = settings.changes
    if "num_labels" in changes:
        changes["ignore_mismatched_sizes"] = True  # a new head for other classes
    model: nn.Module
    # Read to the host: transformers takes any other default device for a `device_map`, which needs accelerate.
    with torch.device("cpu"):
        model, report = automatic.from_pretrained(
            settings.path,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **changes,
        )
    # A head may be new, but a model of which nothing was found would be trained from scratch without a word.
    missing = set(report["missing_keys"])
    if missing >= {name for name, _ in model.named_parameters()}:
        raise InputError(
            f"model.path: no weight in {settings.path} has the name of one of {type(model).__name__}",
            field="model.path",
            found=settings.path,
        )
    reshaped = {name for name, *_ in report["mismatched_keys"]}
    new = NewWeights(str(settings.path), str(settings.task), tuple(sorted(missing - reshaped)), tuple(sorted(reshaped)))
    model.gradus_new_weights = new  # type: ignore[assignment]
    return model


def require_known_weights(model: nn.Module, skip: Sequence[str]) -> None:
    """Refuse a model of which parts started anew that the recipe (`model.weights_skip`) does not name."""
    new: NewWeights | None = getattr(model, "gradus_new_weights", None)
    if new is None:
        return
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in (*new.missing, *new.reshaped)):
            raise InputError(
                f"model.weights_skip: {pattern!r} names nothing that {new.folder} lacks; what it has is read",
                field="model.weights_skip",
                found=pattern,
                allowed=[*new.missing, *new.reshaped],
            )
    unnamed = [name for name in new.missing if not any(fnmatchcase(name, pattern) for pattern in skip)]
    if not unnamed:
        return
    own = task_of(read_config(Path(new.folder)).get("architectures") or ())
    of = f"is of task {own}" if own else "does not say what task it is of"
    patterns = json.dumps([*skip, *_whole_parts(unnamed, [name for name, _ in model.named_parameters()])])
    shown = ", ".join(unnamed[:NAMES_SHOWN])
    more = f", ... and {len(unnamed) - NAMES_SHOWN} more" if len(unnamed) > NAMES_SHOWN else ""
    raise InputError(
        f"model.path: {new.folder} {of}, and lacks weights that {new.task} needs ({len(unnamed)}): {shown}{more}",
        hint=("" if own in (None, new.task) else f"is task: {own} meant? ")
        + f"to start these with new ones: --set 'model.weights_skip={patterns}'",
        field="model.path",
        found=new.folder,
        missing=unnamed,
    )


def _whole_parts(missing: Sequence[str], names: Iterable[str]) -> list[str]:
    """Patterns for the missing names: of the largest parts of the model of which nothing was found."""
    found = set(names) - set(missing)
    patterns: dict[str, None] = {}
    for name in missing:
        steps = name.split(".")
        parts = (".".join(steps[:count]) + "." for count in range(1, len(steps)))
        whole = next((part for part in parts if not any(other.startswith(part) for other in found)), None)
        patterns[name if whole is None else f"{whole}*"] = None
    return list(patterns)


def _configuration(transformers: Any, settings: HuggingFaceSettings) -> Any:
    """The configuration object; keys that it does not know are refused, which transformers would keep in silence."""
    assert settings.config is not None
    given = {key: value for key, value in settings.config.items() if key != "model_type"} | settings.changes
    kind = settings.config["model_type"]
    default = transformers.AutoConfig.for_model(kind)
    known = {*default.to_dict(), *type(default).attribute_map, "architectures", "num_labels", "torch_dtype"}
    known |= {"decoder_start_token_id"}  # what a decoder begins with: configurations have it only where it is given
    known |= set(inspect.signature(type(default).__init__).parameters) - {"self", "kwargs"}
    for key in given:
        if key not in known:
            raise unknown_name(f"key of {kind}:", key, known, field=f"model.config.{key}")
    return transformers.AutoConfig.for_model(kind, **given)


def _first_sentences(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300].rpartition(" ")[0] + " ..."


@cache
def _derived(kind: type[nn.Module]) -> type[nn.Module]:
    """A class for models of `kind` whose forward also takes batches of our own."""

    def forward(self: nn.Module, *positional: Any, **named: Any) -> Any:
        ours = _own_batch(positional, named)
        if ours is None:
            return kind.forward(self, *positional, **named)
        inputs, targets, others = ours
        logits = _logits(self, kind, inputs, targets, others)
        loss: Any = self.loss_of_logits
        return logits if targets is None else loss(logits, targets, self.training)

    forward.__signature__ = _signature(kind)  # type: ignore[attr-defined]
    # The name is that of the model's own class, because save_pretrained writes it down.
    added = {"forward": forward, "loss_of_logits": staticmethod(classification_loss)}
    return type(kind.__name__, (kind,), {**added, "__module__": __name__, "__doc__": kind.__doc__})


def _signature(kind: type[nn.Module]) -> inspect.Signature:
    """Of the class itself, which `generate` looks at, and our own keys besides."""
    own = inspect.signature(kind.forward)
    keys = ("tokens", "targets", "documents")
    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in keys]
    parameters = list(own.parameters.values())
    last = parameters[-1:] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    return own.replace(parameters=[*parameters[: len(parameters) - len(last)], *ours, *last])


def _own_batch(
    positional: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]] | None:
    """(inputs, targets, other keywords) if the call is what our sources' batches make: text by name, images a pair."""
    if "tokens" in named:
        others = {key: value for key, value in named.items() if key not in ("tokens", "targets")}
        return named["tokens"], named.get("targets"), others
    if len(positional) == 2 and positional[0].is_floating_point():
        return positional[0], positional[1], dict(named)
    return None


def _logits(
    model: nn.Module, kind: type[nn.Module], inputs: Tensor, targets: Tensor | None, others: dict[str, Any]
) -> Tensor:
    config: Any = model.config
    if inputs.is_floating_point():
        return kind.forward(model, pixel_values=inputs, **others).logits  # type: ignore[no-any-return]
    documents = others.pop("documents", None)
    if documents is not None:
        others |= keywords_for(model, documents)
    context: Any = model.gradus_context
    if context is not None:
        require_length(inputs.shape[1], context)
    if getattr(config, "is_encoder_decoder", False) and targets is not None and targets.dim() == 2:
        # What the decoder has seen when it predicts a target are the targets before it.
        others["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=targets)  # type: ignore[operator]
    logits: Tensor = kind.forward(model, input_ids=inputs, **others).logits
    return logits

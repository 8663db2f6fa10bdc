"""Valid labels: how many targets the mean is over that a Hugging Face model returns as its loss.

Such a model divides by the labels of its own micro-batch that are not -100. Multiplied by their number, the mean is a
sum again, and sums add up exactly over micro-batches and ranks however unequal their texts are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradus.models.output import IGNORED
from gradus.schema.foreign import is_of, is_pretrained_model

# How a model compares logits with labels: position by position, each with the label after it, or one label a sample.
Rule = Literal["same position", "next position", "sample"]

_OF_LOSS_FUNCTION: dict[str, Rule] = {
    "ForCausalLMLoss": "next position",
    "ForMaskedLMLoss": "same position",
    "ForTokenClassification": "same position",
    "ForSequenceClassificationLoss": "sample",
}
_OWN_CROSS_ENTROPY = re.compile(r"CrossEntropyLoss\((?:ignore_index=-100)?\)|mlm_loss_fct\(|cross_entropy\(")
# Their losses are also means over other things than their labels.
_UNLIKE_OTHERS = re.compile(r"^(Bros|Luke|ProphetNet|Musicgen|Clvp|BlipText)")


def rule_for(model: nn.Module) -> Rule | None:
    """How the model's own loss treats labels; None if that is not known for sure: then samples are counted."""
    if not is_pretrained_model(type(model)) or hasattr(model, "_loss_function"):
        return None
    # gradus.models.huggingface hands such batches on to the class that it is derived from.
    defining = next(
        kind for kind in type(model).__mro__ if "forward" in vars(kind) and not is_of(kind, "gradus.models.huggingface")
    )
    name = defining.__name__
    if not is_of(defining, "transformers") or _UNLIKE_OTHERS.match(name):
        return None
    try:
        source = inspect.getsource(defining.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return None
    if "self.loss_function(" in source:
        function: Any = model.loss_function
        return _OF_LOSS_FUNCTION.get(function.__name__)
    if not _OWN_CROSS_ENTROPY.search(source):
        return None
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return "sample"
    generates = bool(getattr(model.config, "is_encoder_decoder", False))
    of_text = ("ForMaskedLM", "ForTokenClassification", "ForCausalLM", "LMHeadModel")
    return "same position" if generates or name.endswith(of_text) else None


def valid_labels(rule: Rule, config: Any, batch: Any, output: Any) -> Tensor | None:
    """The number of labels in the model's mean, on their device; None where samples are what is counted."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not isinstance(logits, Tensor):
        return None
    if rule == "sample":
        kind, classes = getattr(config, "problem_type", None), getattr(config, "num_labels", 0)
        if kind not in (None, "single_label_classification") or classes < 2 or labels.numel() != len(logits):
            return None
    elif logits.shape[:-1] != labels.shape:
        return None
    return (shifted(labels) if rule == "next position" else labels).ne(IGNORED).sum()


def shifted(labels: Tensor) -> Tensor:
    """Each position's label is that of the next one; the last position has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)

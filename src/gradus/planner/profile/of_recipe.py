"""Of a recipe: the profile of its model, its loss and its data, traced without a GPU and without reading the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus.data.source import source_options
from gradus.data.sources.synthetic import SyntheticImages, SyntheticTokens
from gradus.models.experts import Experts
from gradus.parallel.tensor import divided_layers
from gradus.planner.profile.assembly import Facts, NotAlike, assembled, tied_elements
from gradus.planner.profile.fallback import fallback_profile
from gradus.planner.profile.program import ModelProfile
from gradus.planner.profile.tracing import FakeModel, Numbers
from gradus.planner.resolve import data_options
from gradus.schema.errors import GradusError
from gradus.schema.plan import Precision
from gradus.schema.recipe import Recipe

SAMPLES = (2, 4)  # of the two passes; one sample alone is no batch to a batch norm
NEWEST = (9, 0)  # the capability that is assumed where none is known

_AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def profile_of(
    recipe: Recipe,
    *,
    precision: Precision,
    narrow_parameters: bool = False,
    capability: tuple[int, int] | None = None,
    channels_last: bool = False,
    micro_batches: tuple[int, int] = SAMPLES,
    fused_attention: bool = True,
) -> ModelProfile:
    """What the recipe's model does in a step, forward and backward, as CUDA would run it.

    A resolved recipe. `fused_attention` False is the software of 2021: attention as separate products and a softmax.
    """
    from gradus.training.described import outlined_model
    from gradus.training.objective import Objective

    dtype = torch.float64 if precision == "fp64" else torch.float32
    model, problem = outlined_model(recipe, dtype)
    notes = [f"the model was built in host memory: {problem}"] if problem else []
    numbers = Numbers(
        autocast=_AUTOCAST.get(precision),
        narrow_parameters=narrow_parameters,
        tf32=precision == "tf32",
        capability=capability or NEWEST,
        fused_attention=fused_attention,
    )
    styles = divided_layers(model, recipe.tensor_plan)
    experts = frozenset(name for name, module in model.named_modules() if isinstance(module, Experts))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fake = FakeModel(model, numbers, styles, experts)
    objective = Objective(recipe, model)

    def loss_of(model: nn.Module, batch: Any, samples: int) -> Tensor:
        losses = objective(model, batch, samples)
        return losses.loss_sum / losses.count.to(losses.loss_sum.dtype)

    examples = Examples(recipe, dtype, channels_last)
    try:
        few, more = (fake.trace(examples.batch(samples), samples, loss_of) for samples in micro_batches)
    except GradusError:  # which a run would meet as well
        raise
    except Exception as error:  # fake tensors have no values, and a model may look at them in any way
        first = str(error).strip().partition("\n")[0]
        return fallback_profile(
            recipe.model.use,
            model,
            f"the model could not be traced ({type(error).__name__}: {first})",
            precision=precision,
            narrow_parameters=narrow_parameters,
            tokens_per_sample=examples.tokens_per_sample,
            sample_bytes=examples.sample_bytes,
        )
    facts = _facts(model, styles, experts)
    try:
        parts, calls = assembled(few, more, micro_batches, facts)
    except NotAlike:
        notes.append("the model runs other operators for other batches: its sizes are taken to be in proportion")
        parts, calls = assembled(more, more, (0, micro_batches[1]), facts)
    return ModelProfile(
        name=recipe.model.use,
        parts=tuple(parts),
        calls=tuple(calls),
        precision=precision,
        narrow_parameters=narrow_parameters,
        micro_batches=micro_batches,
        tokens_per_sample=examples.tokens_per_sample,
        sample_bytes=examples.sample_bytes,
        tied_elements=tied_elements(few),
        notes=tuple(notes),
    )


def _facts(model: nn.Module, styles: dict[str, str], experts: frozenset[str]) -> Facts:
    divided: dict[int, str] = {}
    of_experts = set()
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if styles.get(name, "").startswith(("colwise", "rowwise", "vocabulary")):
                divided[id(parameter)] = styles[name]
            if name in experts:
                of_experts.add(id(parameter))
    return Facts(divided, frozenset(of_experts))


class Examples:
    """Batches of the recipe's data, as far as a model looks at them: their shapes."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, channels_last: bool) -> None:
        from gradus.data.loader import Indexed
        from gradus.training.building import open_data

        self._dtype = dtype
        self._channels_last = channels_last
        stand_in = _stand_in(recipe)
        if stand_in is not None:
            self._data = Indexed(stand_in.open("train", recipe.seed))
        else:
            data = open_data(recipe, "train")
            assert data is not None, "there is always something to train on"
            self._data = data
        source = self._data.source
        self.tokens_per_sample = source.tokens_per_sample if source is not None else None
        raw = self._data.fetch(np.zeros(1, dtype=np.int64), recipe.seed)
        tensors = raw.values() if isinstance(raw, dict) else raw
        self.sample_bytes = float(sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)))
        self._seed = recipe.seed

    def batch(self, samples: int) -> Any:
        raw = self._data.fetch(np.zeros(samples, dtype=np.int64), self._seed)
        batch: Any = self._data.finish(raw, self._dtype)
        if not self._channels_last:
            return batch
        return tuple(t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in batch)


def _stand_in(recipe: Recipe) -> SyntheticTokens | SyntheticImages | None:
    """Data of the same shape that needs no files, where the recipe tells the shape; None: it must be looked at."""
    if not recipe.data.built_in:
        return None
    options = source_options(recipe.data.use, data_options(recipe))
    if options.content == "images":
        shape = options.image_shape()
        return SyntheticImages(channels=shape[0], size=shape[1], samples=16) if shape and shape[0] in (1, 3) else None  # type: ignore[arg-type]
    context = getattr(options, "context", None)
    if context is None or getattr(options, "form", "tokens") != "tokens" or recipe.data.use == "chat":
        return None
    return SyntheticTokens(context=context, objective=getattr(options, "objective", "next"), samples=16)

"""Of a recipe: the profile of its model, its loss and its data, traced without a GPU and without reading the data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradus.data.source import Source, source_options
from gradus.data.sources.packed import EmptyPacks
from gradus.data.sources.synthetic import SyntheticImages, SyntheticTokens
from gradus.models.experts import Experts
from gradus.parallel.blocks import repeated_blocks
from gradus.parallel.support import LOSS_KERNEL_CAPABILITY
from gradus.parallel.tensor import divided_layers
from gradus.planner.profile.assembly import (
    Facts,
    alike,
    assembled,
    in_proportion,
    tied_elements,
    with_eager_operators,
)
from gradus.planner.profile.fallback import estimated
from gradus.planner.profile.program import ModelProfile
from gradus.planner.profile.recording import Recorder
from gradus.planner.profile.tracing import FakeModel, Numbers
from gradus.planner.resolve import data_options
from gradus.record.format import error_text, first_line
from gradus.schema.errors import GradusError
from gradus.schema.plan import Precision, Scaling
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
    fp8_scaling: Scaling = "tensor",
    loss_chunks: int = 1,
) -> ModelProfile:
    """What the recipe's model does in a step, forward and backward, as CUDA would run it.

    A resolved recipe. `fused_attention` False is the software of 2021: attention as separate products and a softmax. A
    model that fails with narrow parameters, and not without, is traced without, and its profile says how it failed.
    """
    numbers = Numbers(
        autocast=_AUTOCAST.get(precision),
        narrow_parameters=narrow_parameters,
        tf32=precision == "tf32",
        capability=capability or NEWEST,
        fused_attention=fused_attention,
    )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    scaling = fp8_scaling if precision == "fp8" else None

    def traced(numbers: Numbers) -> ModelProfile:
        return _traced(recipe, numbers, dtype, micro_batches, channels_last, scaling, loss_chunks, capability)

    with torch.random.fork_rng(devices=[]):  # whoever plans and then trains here draws what they would have drawn
        try:
            found = traced(numbers)
        except _TraceFailed as failed:
            found = failed.estimate
            if narrow_parameters:
                with suppress(_TraceFailed):  # whatever the parameters are in
                    wide = traced(replace(numbers, narrow_parameters=False))
                    return replace(wide, precision=precision, narrow_failure=failed.said)
            if failed.error is not None:
                raise failed.error from failed.error.__cause__
    return replace(found, precision=precision, narrow_parameters=narrow_parameters)


class _TraceFailed(Exception):
    """Fake tensors have no values, and a model may look at them in any way; or it would fail in a run, too."""

    def __init__(self, error: GradusError | None, said: str, estimate: ModelProfile) -> None:
        """`error`: what a run would meet as well."""
        super().__init__(said)
        self.error, self.said, self.estimate = error, said, estimate


def _traced(
    recipe: Recipe,
    numbers: Numbers,
    dtype: torch.dtype,
    micro_batches: tuple[int, int],
    channels_last: bool,
    fp8_scaling: Scaling | None,
    loss_chunks: int,
    capability: tuple[int, int] | None,
) -> ModelProfile:
    from gradus.training.chunked_loss import ChunkedLoss, cannot_chunk
    from gradus.training.compilation import names_left_out, names_of_compiled
    from gradus.training.described import outlined_model
    from gradus.training.float8 import use_float8
    from gradus.training.loss_placement import chunk_loss
    from gradus.training.objective import Objective

    model, problem = outlined_model(recipe, dtype)
    styles = divided_layers(model, recipe.tensor_plan)
    experts = frozenset(name for name, module in model.named_modules() if isinstance(module, Experts))
    objective = Objective(recipe, model)
    examples = Examples(recipe, dtype, channels_last)
    if loss_chunks > 1:
        # Machines without a GPU, and those that nobody knows, do without the kernel, and need more memory.
        kernel = capability is not None and capability >= LOSS_KERNEL_CAPABILITY
        chunk_loss(model, loss_chunks, objective, examples.batch(1), kernel)
    if fp8_scaling is not None:
        use_float8(model, fp8_scaling)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fake = FakeModel(model, numbers, styles, experts)

    def loss_of(model: nn.Module, batch: Any, samples: int) -> Tensor:
        losses = objective(model, batch, samples)
        return losses.loss_sum / losses.count.to(losses.loss_sum.dtype)

    bare = ModelProfile(
        name=recipe.model.use,
        micro_batches=micro_batches,
        tokens_per_sample=examples.tokens_per_sample,
        sample_bytes=examples.sample_bytes,
        input_bytes=examples.input_bytes,
        module_parameters=_module_parameters(model),
        class_name=type(model).__name__,
        notes=(f"the model was built in host memory: {problem}",) if problem else (),
    )
    loss_tokens = [0]
    for module in model.modules():
        if isinstance(module, ChunkedLoss):
            module.register_forward_pre_hook(lambda _, given: loss_tokens.append(given[2].numel()))

    def passes(*, ghosts: bool) -> tuple[Recorder, ...]:
        return tuple(fake.trace(examples.batch(samples), samples, loss_of, ghosts=ghosts) for samples in micro_batches)

    def steady_passes(*, ghosts: bool) -> tuple[Recorder, ...]:
        few, more = passes(ghosts=ghosts)
        # What a first forward makes and keeps (tables of positions, a mask) is there in all others.
        return (few, more) if alike(few, more) else passes(ghosts=ghosts)

    try:
        try:
            few, more = steady_passes(ghosts=True)
        except Exception:  # a block may leave something where the model looks for it, and no ghost does
            few, more = steady_passes(ghosts=False)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, GradusError) and isinstance(error.__cause__, Exception) else error
        looked = ", after it looked at a number, of which a trace has none" if fake.looked_at_numbers else ""
        reason = f"the model could not be traced ({error_text(cause)}{looked})"
        sized = replace(bare, tokens_per_sample=bare.tokens_per_sample or examples.length)
        estimate = estimated(sized, model, reason, narrow=numbers.autocast is not None)
        if isinstance(error, GradusError) and not fake.looked_at_numbers:
            raise _TraceFailed(error, first_line(error).removeprefix("model: "), estimate) from error
        failure = None
        if loss_chunks > 1:
            failure = cannot_chunk(reason)
            failure.__cause__ = error
        raise _TraceFailed(failure, f"the model failed: {error_text(error)}", estimate) from error
    facts = _facts(model, styles, experts)
    if alike(few, more):
        parts, calls, modules = assembled(few, more, micro_batches, facts)
    else:
        note = "the model runs other operators for other batches: its sizes are taken to be in proportion"
        bare = replace(bare, notes=(*bare.notes, note))
        parts, calls, modules = in_proportion(more, micro_batches[1], facts)
    compiled, left_out = names_of_compiled(model), names_left_out(model)
    tied, trained = tied_elements(few)
    order = {block: number for number, block in enumerate(repeated_blocks(model))}
    return replace(
        bare,
        parts=tuple(with_eager_operators(part, compiled, left_out) for part in parts),
        calls=tuple(calls),
        tied_elements=tied,
        tied_trained=trained,
        loss_tokens=loss_tokens[-1] / micro_batches[1],
        block_order=tuple(order[module] for module in modules if module is not None),
    )


def _module_parameters(model: nn.Module) -> tuple[tuple[str, int], ...]:
    counted: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in counted]
        counted |= {id(p) for p in own}
        found.append((name, sum(p.numel() for p in own)))
    return tuple((name, elements) for name, elements in found if elements)


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
            self._data = Indexed(stand_in)
        else:
            data = open_data(recipe, "train")
            assert data is not None, "there is always something to train on"
            self._data = data
        source = self._data.source
        self.tokens_per_sample = source.tokens_per_sample if source is not None else None
        raw = self._data.fetch(np.zeros(1, dtype=np.int64), recipe.seed)
        handed_over, finished = _storages(raw), self._data.finish(raw, dtype)
        self.length = _length(finished)
        made = {key: size for key, size in _storages(finished).items() if key not in handed_over}
        self.sample_bytes, self.input_bytes = float(sum(handed_over.values())), float(sum(made.values()))
        self._seed = recipe.seed

    def batch(self, samples: int) -> Any:
        raw = self._data.fetch(np.zeros(samples, dtype=np.int64), self._seed)
        batch: Any = self._data.finish(raw, self._dtype)
        if not self._channels_last:
            return batch
        return tuple(t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in batch)


def _length(batch: Any) -> int | None:
    """Of a sample that looks like a sequence of tokens."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    is_sequence = first is not None and first.dtype in (torch.int32, torch.int64) and first.ndim == 2
    return first.shape[1] if first is not None and is_sequence and first.shape[1] > 1 else None


def _storages(batch: Any) -> dict[int, int]:
    """Bytes of the tensors in a batch, each piece of memory once."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _stand_in(recipe: Recipe) -> Source | None:
    """Data of the same shape that needs no files, where the recipe tells the shape; None: it must be looked at."""
    if not recipe.data.built_in:
        return None
    options = source_options(recipe.data.use, data_options(recipe))
    if options.content == "images":
        shape = options.image_shape()
        if not shape or shape[0] not in (1, 3):
            return None
        return SyntheticImages(channels=shape[0], size=shape[1], samples=16).open("train", recipe.seed)  # type: ignore[arg-type]
    context = getattr(options, "context", None)
    if context is None or getattr(options, "form", "tokens") != "tokens" or recipe.data.use == "chat":
        return None
    if recipe.data.packs:
        return EmptyPacks(16, context)
    objective: Any = getattr(options, "objective", "next")
    return SyntheticTokens(context=context, objective=objective, samples=16).open("train", recipe.seed)

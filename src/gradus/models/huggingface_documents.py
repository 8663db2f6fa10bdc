"""Documents in the sequences of a Hugging Face model: positions that begin anew, from which it derives its mask.

transformers does that in most decoders, where no attention mask is given, but not in all: some let documents see each
other without a word. So it is asked only of kinds of models for which a test compares packs with single documents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradus.models.documents import positions_in
from gradus.schema.errors import InputError

# opt, falcon, bloom and mamba were tried too (transformers 5.22.2): their documents see each other.
KEPT_APART = (
    *("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "phi3"),
    *("olmo", "olmo2", "granite", "smollm3", "starcoder2", "glm4", "cohere2", "stablelm"),
)
WITH_A_MASK = ("sdpa", "eager")  # flash_attention_2 takes batches of one sample for packed, and no others


def require_apart(model: nn.Module) -> None:
    """Refuse a model of transformers that would let documents of one sequence see each other."""
    config: Any = model.config
    if config.model_type not in KEPT_APART or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise InputError(
            f"data.packing: found true, but {type(model).__name__} ({config.model_type}) is not known to keep the "
            f"documents of a sequence apart. Allowed: causal models of {', '.join(KEPT_APART)}",
            hint="use data.packing=false, or one of gradus's own models, gpt or bert",
            field="data.packing",
            found=True,
            allowed=False,
        )
    if config._attn_implementation not in WITH_A_MASK:
        raise InputError(
            f"data.packing: found true, but with attention by {config._attn_implementation} {type(model).__name__} "
            "does not keep the documents of a sequence apart",
            hint="build it with attn_implementation='sdpa', or use data.packing=false",
            field="data.packing",
            found=True,
            allowed=False,
        )


def keywords_for(model: nn.Module, documents: Tensor) -> dict[str, Any]:
    """What the model's forward is given so that it keeps the documents apart. With a cache it would not."""
    require_apart(model)
    return {"position_ids": positions_in(documents), "use_cache": False}

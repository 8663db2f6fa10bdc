"""Models of Hugging Face as people bring them: a function that makes one, data in the model's own keys, no loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

HERE = __file__
VOCABULARY = 40
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    **SPECIAL,
}


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Tied weights and a cache of keys and values by default."""
    from transformers import AutoModelForCausalLM, GPT2Config

    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return AutoModelForCausalLM.from_config(GPT2Config(**sizes, **dropouts, **SPECIAL))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 1, **changes}))


def bert(head: str = "BertForMaskedLM", **changes: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, **changes
    )
    return getattr(transformers, head)(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    )


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    return BartForConditionalGeneration(
        BartConfig(**sizes, dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=2, **SPECIAL)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(
        ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0)
    )


class MeanOfBert(nn.Module):
    """A head of one's own on a bare encoder, whose pooler is then never used."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = bert("BertModel")
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        y: Tensor = self.head(hidden.mean(1))
        return y


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of unequal length, padded; labels are -100 where there is nothing to predict."""

    def __init__(self, samples: int = 60, length: int = 12, labels: str = "tokens", empty: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
        self.lengths = torch.randint(2, length + 1, (samples,), generator=generator)
        self.classes = torch.randint(0, 3, (samples,), generator=generator)
        self.labels = labels
        self.empty = empty  # whether every other sample has no label at all

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        valid = torch.arange(self.tokens.shape[1]) < self.lengths[index]
        tokens = torch.where(valid, self.tokens[index], 0)
        labels = torch.where(valid & (not (self.empty and index % 2)), tokens, -100)
        return {
            "input_ids": tokens,
            "attention_mask": valid.long(),
            "labels": labels if self.labels == "tokens" else self.classes[index],
        }


class Encodings(Sentences):
    """As a tokenizer gives them: lists of numbers in a BatchEncoding."""

    def __getitem__(self, index: int) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({key: value.tolist() for key, value in super().__getitem__(index).items()})


class Pictures(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int = 60) -> None:
        generator = torch.Generator().manual_seed(4)
        self.pixels = torch.randn(samples, 3, 8, 8, generator=generator)
        self.classes = torch.randint(0, 3, (samples,), generator=generator)
        self.classes[::5] = -100

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.classes[index]}

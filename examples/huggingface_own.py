"""A Hugging Face model and a dataset in its own keys, as people bring them: nothing of gradus in it."""

from __future__ import annotations

import random
from typing import Any

from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

GOOD, BAD = ["good", "great", "fine", "lovely", "splendid"], ["bad", "poor", "dull", "awful", "dreadful"]
NEUTRAL = ["the", "film", "was", "a", "very", "rather", "story", "with", "its", "actors", "and", "music"]
WORDS = ["[PAD]", *GOOD, *BAD, *NEUTRAL]


def classifier(width: int) -> nn.Module:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


class Reviews(Dataset[dict[str, Any]]):
    """Sentences of up to 16 words, padded as a tokenizer does it; one word in each tells whether it is praise."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        label = index % 2
        words = draw.choices(NEUTRAL, k=draw.randint(3, 15))
        words.insert(draw.randrange(len(words)), draw.choice(GOOD if label else BAD))
        ids = [WORDS.index(word) for word in words]
        padding = [0] * (16 - len(ids))
        return {"input_ids": ids + padding, "attention_mask": [1] * len(ids) + padding, "labels": label}

"""Recipes and clusters for tests of what can be combined: small ones, of which nothing is ever built."""

from __future__ import annotations

from typing import Any

from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.recipe import Recipe

# Of a rule's name, a plan, what else the recipe has, where it is to run, and the message.
Refusal = tuple[str, dict[str, Any], dict[str, Any], Cluster, str]

CPU = Cluster(name="laptop", cpu_cores=8, memory_gib=16)
GPT = {"use": "gpt", "layers": 4, "width": 64, "heads": 4, "context": 32}
MIXTURE = {**GPT, "experts": 6}
LATENT = {**GPT, "attention": "latent", "kv_rank": 16, "positions": "rotary"}
IMAGES = {"data": {"use": "synthetic-images"}}
RESNET = {"model": {"use": "resnet18"}, **IMAGES}
HUGGINGFACE = {"model": {"use": "huggingface", "config": {"model_type": "gpt2"}, "task": "causal-lm"}}
OWN = {"model": {"use": "own.py:Net"}}
PARTS = {"pipeline_parts": ["embedding", "layers", "output"]}


def gpus(major: int, minor: int) -> Cluster:
    gpu = GpuNumbers(name=f"GPU {major}{minor}", memory_gib=80, compute_capability=[major, minor])
    return Cluster(name="box", gpus_per_node=8, gpu=gpu, cpu_cores=64, memory_gib=512)


H100, A100, V100 = gpus(9, 0), gpus(8, 0), gpus(7, 0)


def recipe(plan: dict[str, Any], **more: Any) -> Recipe:
    text = {"model": GPT, "data": {"use": "synthetic-tokens"}}
    basics = {"name": "tiny", "batch": 16, "steps": 3, "optimizer": {"lr": 0.1}}
    return Recipe.from_document({**basics, **text, "plan": plan, **more})

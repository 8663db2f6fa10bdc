"""Cutting a model into stages, and training through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_cases import GPT, Case, alone, changing_shapes, in_stages
from pool import Pool
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.parallel.pipeline import StagesHere, cut
from gradus.parallel.stages import balanced, bubble, ranges
from gradus.parallel.wiring import REFERENCE_PARTS, Wiring, traced
from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import PipelineParts

PARTS = PipelineParts(head="inner.embed", blocks="inner.layers", tail="out")
TOKENS = (torch.zeros(1, 4, dtype=torch.long),)
BERT = {"use": "bert", "layers": 4, "width": 16, "heads": 2, "context": 8, "vocabulary": 32, "pooler": True}
VIT = {"use": "vit", "layers": 4, "width": 16, "heads": 2, "image": 16, "patch": 4}


def called(model: Callable[..., Any], batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


# --- balance


@pytest.mark.parametrize("after", [0.0, 0.7, 2.5])
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(after: float) -> None:
    costs = [1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    for stages in range(1, len(costs) + 1):
        counts = balanced(costs, stages, before=0.5, after=after)
        assert sum(counts) == len(costs)
        assert min(counts) >= 1

        def slowest(counts: list[int]) -> float:
            sums = [sum(costs[i] for i in span) for span in ranges(counts)]
            sums[0] += 0.5
            return max([*sums[:-1], sums[-1] + after])

        ends = [[0, *inner, len(costs)] for inner in itertools.combinations(range(1, len(costs)), stages - 1)]
        every = [[end - first for first, end in itertools.pairwise(several)] for several in ends]
        assert slowest(counts) == pytest.approx(min(map(slowest, every)))


def test_a_large_vocabulary_takes_blocks_off_the_last_stage() -> None:
    assert balanced([1.0] * 12, 4) == [3, 3, 3, 3]
    assert balanced([1.0] * 12, 4, after=3.0)[-1] == 1
    wide = {"use": "gpt", "layers": 8, "width": 16, "heads": 2, "context": 8, "vocabulary": 16}
    few, many = (stage_counts({**wide, "vocabulary": size}, 4) for size in (16, 2048))
    assert few == [2, 2, 2, 2], "an embedding is nearly free to look up in"
    assert many[-1] == 1, "but not to multiply with"


def test_idle_time_by_the_published_formulas() -> None:
    assert bubble("gpipe", 4, 8) == bubble("1f1b", 4, 8) == 3 / 8
    assert bubble("interleaved", 4, 8, 2) == 3 / 16
    assert bubble("zero-bubble", 4, 8) == 1 / 8
    assert bubble("1f1b", 1, 8) == 0


# --- wiring


class Model(nn.Module):
    """A model of one's own: its parts have names of their own, and forward may do more than call them in turn."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.out = nn.Linear(8, 16, bias=False)  # before the rest, so that it has the first name if it is tied
        self.inner = nn.Module()
        self.inner.embed = nn.Embedding(16, 8)
        self.inner.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.inner.scale = nn.Parameter(torch.ones(()))  # what no part has
        self.between = between

    def forward(self, tokens: Tensor) -> Any:
        tokens = tokens.clone() if self.between == "copied batch" else tokens
        x = self.inner.embed(tokens)
        x = x * 2 if self.between == "scaled" else x
        x = x.mul_(2) if self.between == "scaled in place" else x
        layers = list(self.inner.layers)
        if self.between == "swapped":
            layers[1], layers[2] = layers[2], layers[1]
        if self.between == "twice":
            layers.append(layers[-1])
        for layer in layers[1:] if self.between == "skipped" else layers:
            x = layer(x)
        if self.between == "looked at":
            x = x * x.sum().item()
        y = self.out(x)
        return y.float() * 1 if self.between == "changed result" else y


def test_the_reference_models_are_wired_as_they_are_written() -> None:
    for settings, batch in (
        (GPT, {"tokens": TOKENS[0], "targets": TOKENS[0]}),
        (BERT, {"tokens": TOKENS[0], "targets": TOKENS[0]}),
        (VIT, {"images": torch.zeros(1, 3, 16, 16), "labels": torch.zeros(1, dtype=torch.long)}),
    ):
        wiring = traced(on_meta(settings), REFERENCE_PARTS, called, batch)
        assert wiring.blocks == settings["layers"]
        first, second = batch
        assert wiring.calls[0].positional[0].value == first
        assert [source.kind for source in wiring.calls[-1].positional] == ["flow", "batch"]
        assert wiring.calls[-1].positional[1].value == second
        assert wiring.costs[-1] > 0


def test_a_model_of_ones_own_is_wired_by_the_names_of_its_parts() -> None:
    wiring = traced(Model(), PARTS, called, TOKENS)
    assert wiring.paths == ["inner.embed", *(f"inner.layers.{i}" for i in range(4)), "out"]


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ("copied batch", "gives inner.embed a tensor of shape"),
        ("scaled", "gives inner.layers.0 a tensor of shape .* not what inner.embed returned"),
        ("scaled in place", "what inner.embed returned is changed in place before inner.layers.0"),
        ("swapped", "gives inner.layers.1 a tensor .* not what inner.layers.0 returned"),
        ("twice", "calls inner.layers.3 2 times"),
        ("skipped", "calls inner.layers.0 never"),
        ("changed result", "result is not what out returned"),
        ("looked at", "cannot be run without data"),
    ],
)
def test_an_edge_that_a_pipeline_would_lose_is_named(between: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        traced(Model(between), PARTS, called, TOKENS)
    assert caught.value.details["field"] == "pipeline_parts"
    assert caught.value.hint


def test_parts_that_are_not_there_are_told_by_name() -> None:
    with pytest.raises(InputError, match=r"inner\.embedd") as caught:
        traced(Model(), PARTS.model_copy(update={"head": "inner.embedd"}), called, TOKENS)
    assert "inner.embed" in f"{caught.value} {caught.value.hint}"
    with pytest.raises(InputError, match="ModuleList or Sequential"):
        traced(Model(), PARTS.model_copy(update={"blocks": "inner"}), called, TOKENS)


# --- cutting


def on_meta(settings: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return catalogue.build(settings["use"], {k: v for k, v in settings.items() if k != "use"})


def parts_of(model: Callable[[], nn.Module], wiring: Wiring, plan: Plan) -> list[StagesHere]:
    """The parts of every rank; `cut` takes only the place from the world."""
    size = plan.mesh.world_size
    worlds = [World(rank, rank, size, torch.device("cpu"), mesh=plan.mesh) for rank in range(size)]
    return [cut(model(), wiring, plan, world) for world in worlds]


def stage_counts(settings: dict[str, Any], ways: int) -> list[int]:
    model = on_meta(settings)
    wiring = traced(model, REFERENCE_PARTS, called, {"tokens": TOKENS[0], "targets": TOKENS[0]})
    return parts_of(lambda: model, wiring, Plan(mesh=Mesh(pipeline=ways)))[0].pipeline_cut.counts


@pytest.mark.parametrize("settings", [GPT, {**GPT, "tied": False}, BERT], ids=["gpt", "gpt untied", "bert"])
@pytest.mark.parametrize("per_rank", [1, 2])
def test_stages_have_the_names_of_the_whole_model_and_only_their_own_blocks(
    settings: dict[str, Any], per_rank: int
) -> None:
    model = on_meta(settings)
    wiring = traced(model, REFERENCE_PARTS, called, {"tokens": TOKENS[0], "targets": TOKENS[0]})
    plan = Plan(mesh=Mesh(pipeline=2), stages_per_rank=per_rank)
    parts = parts_of(lambda: model, wiring, plan)
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    tied = set(parts[0].pipeline_cut.tied)
    assert set(names[0]) | set(names[1]) == {name for name, _ in model.named_parameters()}
    assert set(names[0]) & set(names[1]) == tied
    assert bool(tied) == settings.get("tied", True)
    assert set().union(*(part.state_dict() for part in parts)) == set(model.state_dict())
    for rank, part in enumerate(parts):
        assert all(tensor.is_meta for tensor in part.parameters()), "no rank ever held it"
        for index, stage in enumerate(part.pipeline_cut.stages):
            number = rank + 2 * index
            here = {name.split(".")[1] for name, _ in stage.named_parameters() if name.startswith("blocks.")}
            assert here == {str(block) for block in ranges(part.pipeline_cut.counts)[number]}
            assert any(name.startswith("embedding.position") for name, _ in stage.named_parameters()) == (number == 0)


def test_what_no_part_has_is_in_the_last_stage() -> None:
    wiring = traced(Model(), PARTS, called, TOKENS)
    first, last = parts_of(Model, wiring, Plan(mesh=Mesh(pipeline=2)))
    assert "inner.scale" in dict(last.named_parameters())
    assert "inner.scale" not in dict(first.named_parameters())


def test_a_tied_parameter_has_its_first_name_in_both_stages() -> None:
    def tied() -> nn.Module:
        model = Model()
        model.inner.embed.weight = model.out.weight
        return model

    wiring = traced(tied(), PARTS, called, TOKENS)
    parts = parts_of(tied, wiring, Plan(mesh=Mesh(pipeline=2)))
    for part in parts:
        assert part.pipeline_cut.tied == ["out.weight"]
        assert "out.weight" in dict(part.named_parameters())
        assert "inner.embed.weight" not in dict(part.named_parameters())


def test_stages_in_the_middle_may_not_share_parameters() -> None:
    def shared() -> nn.Module:
        model = Model()
        model.inner.layers[3].weight = model.inner.layers[0].weight
        return model

    wiring = traced(shared(), PARTS, called, TOKENS)
    with pytest.raises(InputError, match=r"share the parameter inner\.layers\.0\.weight"):
        parts_of(shared, wiring, Plan(mesh=Mesh(pipeline=2)))


def test_more_stages_than_blocks_are_refused_with_the_numbers() -> None:
    wiring = traced(Model(), PARTS, called, TOKENS)
    with pytest.raises(InputError, match=r"8 stages, but the model has 4 blocks"):
        parts_of(Model, wiring, Plan(mesh=Mesh(pipeline=4), stages_per_rank=2))
    with pytest.raises(InputError, match=r"2 stages with 3 blocks, but there are 2 stages and 4 blocks"):
        parts_of(Model, wiring, Plan(mesh=Mesh(pipeline=2), stage_blocks=[1, 2]))
    parts = parts_of(Model, wiring, Plan(mesh=Mesh(pipeline=2), stage_blocks=[3, 1]))
    assert parts[0].pipeline_cut.counts == [3, 1]


# --- training


INTERLEAVED = {"pipeline_schedule": "interleaved", "stages_per_rank": 2}
CASES = {
    "short micro-batches": Case({"pipeline": 2}, samples=(2, 1, 1, 0)),
    "short micro-batches, several stages, replicas": Case(
        {"pipeline": 2, "replicate": 2}, INTERLEAVED, samples=(4, 3, 2, 0)
    ),
    "zero-bubble, two stages per rank, shards": Case(
        {"pipeline": 2, "shard": 2}, {"pipeline_schedule": "zero-bubble", "stages_per_rank": 2, "zero": 2}
    ),
    "one block per stage, zero 3": Case({"pipeline": 2, "shard": 2}, model={**GPT, "layers": 2}),
    "fewer micro-batches than ranks": Case({"pipeline": 4}, {"pipeline_schedule": "zero-bubble"}, samples=(2, 2)),
    "one micro-batch": Case({"pipeline": 4}, {"pipeline_schedule": "gpipe"}, samples=(2,)),
    "a decoder tied to the embedding": Case({"pipeline": 2}, model=BERT),
    "a frozen first stage, zero-bubble": Case(
        {"pipeline": 2}, {"pipeline_schedule": "zero-bubble"}, {**GPT, "tied": False}, frozen="embedding|blocks.[0-3]"
    ),
    "a frozen first stage": Case({"pipeline": 2}, {}, {**GPT, "tied": False}, frozen="embedding|blocks.[0-3]"),
    "images": Case({"pipeline": 2}, {"pipeline_schedule": "zero-bubble"}, VIT),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_learn_what_one_process_learns(pool: Pool, name: str) -> None:
    case = CASES[name]
    one = pool.run(1, alone, case)[0]
    ranks = pool.run(case.planned().mesh.world_size, in_stages, case)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-12)
        assert rank["validation"] == pytest.approx(one["validation"], rel=1e-12)
        for key, weight in rank["weights"].items():
            torch.testing.assert_close(weight, one["weights"][key], rtol=1e-9, atol=1e-11)
    assert set().union(*(rank["weights"] for rank in ranks)) == set(one["weights"])


@pytest.mark.parametrize("mesh", [{"pipeline": 2, "replicate": 2}, {"pipeline": 2, "shard": 2}], ids=str)
def test_both_copies_of_a_tied_table_stay_the_same_to_the_last_bit(pool: Pool, mesh: dict[str, int]) -> None:
    ranks = pool.run(4, in_stages, Case(mesh))
    tables = [rank["weights"]["embedding.token.weight"] for rank in ranks]
    heads = [rank["weights"]["head.output.weight"] for rank in ranks if "head.output.weight" in rank["weights"]]
    assert len(tables) == 4
    assert len(heads) == 2
    for other in [*tables[1:], *heads]:
        assert torch.equal(tables[0], other)


def test_micro_batches_of_other_shapes_are_refused_on_every_rank(pool: Pool) -> None:
    for said in pool.run(2, changing_shapes):
        assert said.startswith("data.use: with a pipeline all micro-batches have the same shapes; 'tokens' was")

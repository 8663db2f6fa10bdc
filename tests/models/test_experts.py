"""A mixture of experts computes what its formula says, keeps its experts busy, and counts what it drops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_work import RealNumbers
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gradus.models import catalogue
from gradus.models.experts import (
    Experts,
    MixtureOfExperts,
    Router,
    _grouped_product,
    _looped_product,
    collected_routings,
)
from gradus.models.layouts import layout_of
from gradus.models.output import LossOutput
from gradus.models.settings import GPTSettings
from gradus.schema.errors import InputError

WIDTH, INNER, EXPERTS = 6, 10, 4


def mixture(
    *,
    per_token: int = 2,
    scores: Any = "softmax",
    scale: float = 1.0,
    activation: str = "swiglu",
    capacity: float | None = None,
    weight: float | None = None,
    rate: float | None = None,
) -> MixtureOfExperts:
    torch.manual_seed(3)
    router = Router(WIDTH, EXPERTS, per_token, scores=scores, scale=scale, biased=rate is not None)
    made = MixtureOfExperts(
        router,
        Experts(EXPERTS, WIDTH, INNER, activation),
        None,
        capacity_factor=capacity,
        balance_weight=weight,
        balance_rate=rate,
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.double()


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def one_token(of: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The formula for one token, expert by expert."""
    logits = of.router.weight @ x
    scores = logits.softmax(0) if of.router.scores == "softmax" else logits.sigmoid()
    bias = 0 if of.router.bias is None else of.router.bias
    chosen = (scores + bias).topk(of.router.per_token).indices
    total = scores[chosen].sum() if of.router.per_token > 1 else 1.0
    y = torch.zeros_like(x)
    for expert in chosen:
        inner = of.experts.up[expert] @ x
        inner = F.gelu(inner) if of.experts.gate is None else F.silu(of.experts.gate[expert] @ x) * inner
        y += of.router.scale * scores[expert] / total * (of.experts.down[expert] @ inner)
    return y


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_every_token_gets_what_its_experts_compute(per_token, scores, activation):
    of = mixture(per_token=per_token, scores=scores, activation=activation, scale=2.5, rate=0.1)
    assert of.router.bias is not None
    of.router.bias.copy_(torch.tensor([0.3, -0.3, 0.0, 0.1]))
    x = tokens()
    expected = torch.stack([torch.stack([one_token(of, token) for token in row]) for row in x])
    assert torch.allclose(of(x), expected, rtol=1e-12, atol=1e-12)


def test_the_bias_decides_who_is_chosen_and_not_how_much_they_count():
    of = mixture(scores="sigmoid", rate=0.1)
    before = of.router(tokens())
    assert of.router.bias is not None
    of.router.bias[3] += 10.0
    after = of.router(tokens())
    assert (after.chosen_btk == 3).any(-1).all()
    assert not (before.chosen_btk == 3).any(-1).all()
    assert torch.equal(before.scores_bte, after.scores_bte)
    assert torch.allclose(after.weights_btk.sum(-1), torch.ones(2, 7, dtype=torch.float64))


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero_and_not_none():
    of = mixture(per_token=1, rate=0.1)
    assert of.router.bias is not None
    of.router.bias[2] -= 100.0
    of(tokens()).sum().backward()
    for weight in (of.experts.gate, of.experts.up, of.experts.down):
        assert weight is not None
        assert weight.grad is not None
        assert weight.grad[2].abs().max() == 0
        assert weight.grad[[0, 1, 3]].abs().sum() > 0


def test_capacity_drops_the_last_tokens_of_a_sequence_and_counts_them():
    of, free = mixture(per_token=1, capacity=1.0), mixture(per_token=1)
    x = tokens(1, 8).expand(3, -1, -1).contiguous()
    x[:, :] = x[:, :1]  # all tokens alike: one expert is wanted 8 times, and takes 8 / 4 = 2
    of.counting = True
    y = of(x)
    assert torch.allclose(y[:, :2], free(x)[:, :2], rtol=1e-12)
    assert y[:, 2:].abs().max() == 0
    assert of.load[:-1].max() == 24
    assert of.load[-1] == 18


def test_what_is_dropped_does_not_depend_on_the_other_sequences_or_on_later_tokens():
    of = mixture(capacity=0.5)
    x = tokens(4, 12)
    whole = of(x)
    assert torch.allclose(whole, torch.cat([of(row.unsqueeze(0)) for row in x]), rtol=1e-12, atol=1e-14)
    kept = (whole != 0).any(-1)
    assert kept.any()
    assert not kept.all()
    other = x.clone()
    other[:, -1] = 1.0
    assert torch.allclose(of(other)[:, :-1], whole[:, :-1], rtol=1e-12, atol=1e-14)


def test_the_balance_loss_is_one_if_all_experts_are_chosen_alike_and_grows_if_not():
    of = mixture(per_token=1, weight=0.5)
    with torch.no_grad():
        of.router.weight.zero_()
        of.router.weight[:4, :4] = torch.eye(4) * 30
    even = torch.zeros(1, 4, WIDTH, dtype=torch.float64)
    even[0, :, :4] = torch.eye(4)
    with collected_routings(of) as routings:
        of(even)
        of(even[:, :1].expand(1, 4, WIDTH).contiguous())
    losses = [of.balance_loss(routing) for _, routing in routings]
    assert losses[0].item() == pytest.approx(0.5 * 1.0)
    assert losses[1].item() == pytest.approx(0.5 * EXPERTS)


def small(**options: Any) -> torch.nn.Module:
    settings = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": 32, "expert_inner": 8, **options}
    torch.manual_seed(3)
    return catalogue.build("gpt", {"experts": 4, **settings}).double()


def text() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def test_the_mean_training_loss_is_cross_entropy_and_the_weighted_balance_losses_of_all_layers():
    plain, balanced = small(dense_layers=1), small(dense_layers=1, balance="loss", balance_weight=0.1)
    without, with_loss = plain(*text()), balanced(*text())
    with collected_routings(balanced) as routings:
        x = balanced.embedding(text()[0])
        for block in balanced.blocks:
            x = block(x)
    losses = [mixture.balance_loss(routing) for mixture, routing in routings]
    assert len(losses) == 2
    extra = (with_loss.loss_sum / with_loss.count - without.loss_sum / without.count).item()
    assert extra == pytest.approx(sum(losses).item(), rel=1e-9)
    assert extra > 0.1 * 2 * 0.99
    balanced.eval()
    assert torch.equal(balanced(*text()).loss_sum, plain.eval()(*text()).loss_sum)


def test_a_block_that_is_computed_again_in_backward_counts_once_and_has_the_same_gradients():
    once, twice = small(balance="loss"), small(balance="loss")
    for block in twice.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    for model in (once, twice):
        for counting in (True, False):
            for block in model.blocks:
                block.mlp.counting = counting
            if counting:
                output = model(*text())
        output.loss_sum.backward()
    for (name, a), b in zip(once.named_parameters(), twice.parameters(), strict=True):
        assert a.grad is not None, name
        assert torch.equal(a.grad, b.grad), name
    assert once.blocks[0].mlp.load.sum() == 2 * 8 * 2
    assert torch.equal(once.blocks[0].mlp.load, twice.blocks[0].mlp.load)


def test_the_bias_moves_by_its_rate_towards_experts_with_too_little_to_do():
    of = mixture(rate=0.25)
    of.load += 7
    of.settle(torch.tensor([10, 2, 6, 6, 0]))
    assert of.router.bias is not None
    assert of.router.bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert of.load.tolist() == [0] * 5


def test_the_bias_is_in_the_checkpoint_and_the_counts_are_not():
    names = small(balance="bias").state_dict().keys()
    assert "blocks.0.mlp.router.bias" in names
    assert not [name for name in names if name.endswith("load")]


def test_one_kernel_for_all_experts_gives_what_a_loop_gives():
    counts = torch.tensor([3, 0, 9, 4])
    x = torch.randn(16, 16).bfloat16()
    w = torch.randn(4, 24, 16).bfloat16()
    together = _grouped_product(counts)(x, w)
    assert torch.allclose(together.float(), _looped_product([3, 0, 9, 4])(x, w).float(), atol=0.1, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"dense_layers": 1, "shared_experts": 1, "activation": "swiglu"},
        {"attention": "latent", "positions": "rotary", "kv_rank": 8, "query_rank": 12, "value_width": 4},
    ],
)
def test_flops_are_those_of_the_experts_that_a_token_uses(options):
    with torch.device("meta"):
        model = small(**options)
        with FlopCounterMode(display=False) as counter:
            x = torch.zeros(3, 8, dtype=torch.int64)
            model(x, x).loss_sum.backward()
    s = model.settings
    plain, turned, value = s.latent_widths
    pairs = s.heads * (plain + turned + value) if s.attention == "latent" else 2 * s.width
    upper_half = 3 * 3 * s.layers * s.context**2 * pairs  # torch counts both halves of causal attention
    assert counter.get_total_flops() == 3 * model.flops_per_sample() + upper_half


def deepseek_v3_parameters() -> int:
    """By hand, from the published configuration: https://huggingface.co/deepseek-ai/DeepSeek-V3."""
    width, heads, layers, dense = 7168, 128, 61, 3
    queries = width * 1536 + 1536 + 1536 * heads * (128 + 64)
    keys_and_values = width * (512 + 64) + 512 + 512 * heads * (128 + 128)
    attention = queries + keys_and_values + heads * 128 * width
    expert = 3 * width * 2048
    mixture = 256 * width + 256 * expert + expert
    mlps = dense * 3 * width * 18_432 + (layers - dense) * mixture
    return 2 * 129_280 * width + layers * (attention + 2 * width) + mlps + width


def test_deepseek_v3_has_its_671_billion_parameters():
    entry = next(entry for entry in catalogue.entries() if entry.name == "deepseek-v3")
    with RealNumbers() as made:
        counted = entry.describe()["parameters"]
    assert made.bytes == 0, "its weights are described and not made"
    assert counted == deepseek_v3_parameters()
    # Published are 671,026,419,200 besides the second-token module: there the bias of each of 58 layers counts as well.
    assert counted == 671_026_419_200 - 58 * 256


@pytest.mark.parametrize(
    ("options", "field", "in_message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token", "at most experts (4)"),
        ({"experts": 4, "dense_layers": 4}, "dense_layers", "fewer than layers (4)"),
        ({"experts": 4, "capacity_factor": 0}, "capacity_factor", "above 0"),
        ({"experts": 0}, "experts", "at least 1"),
        ({"experts": 4, "balance": "los"}, "balance", "did you mean 'loss'"),
        ({"experts": 4, "balance": "bias", "balance_weight": 0.1}, "balance_weight", "only with balance=loss"),
        ({"experts": 4, "balance_rate": 0.1}, "balance_rate", "only with balance=bias"),
        ({"shared_experts": 1}, "shared_experts", "only with model.experts"),
        ({"balance": "loss"}, "balance", "only with model.experts"),
        ({"kv_rank": 8}, "kv_rank", "only with attention=latent"),
        ({"attention": "latent", "positions": "rotary"}, "kv_rank", "that keys and values are made from"),
        ({"attention": "latent", "kv_rank": 8}, "positions", "rotary"),
        ({"attention": "latent", "kv_rank": 8, "positions": "rotary", "kv_heads": 2}, "kv_heads", "null"),
        ({"attention": "latent", "kv_rank": 8, "positions": "rotary", "rotary_width": 3}, "rotary_width", "even"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(options, field, in_message):
    with pytest.raises(InputError) as error:
        catalogue.resolve("gpt", options)
    assert error.value.details["field"] == f"model.{field}"
    assert in_message in error.value.message


@pytest.mark.parametrize(
    ("options", "what"),
    [({"experts": 4}, "a mixture of experts"), ({"attention": "latent", "kv_rank": 8}, "latent attention")],
)
def test_no_layout_of_hugging_face_holds_a_mixture_or_latent_attention(options, what):
    settings = GPTSettings(positions="rotary", norm="rmsnorm", activation="swiglu", **options)
    with pytest.raises(InputError, match=what):
        layout_of(settings)


def test_bfloat16_by_autocast_routes_in_float32():
    model = small(balance="loss", shared_experts=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(*text())
        routing = model.blocks[0].mlp.router(torch.randn(1, 2, 16).bfloat16())
    assert isinstance(output, LossOutput)
    output.loss_sum.backward()
    assert routing.scores_bte.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

"""Published: formulas from papers and courses for the memory and the work of training, as they are printed there.

They are for comparison, and for numbers on the back of an envelope. What a plan needs here is predicted from what its
model does (memory/rank_memory.py, speed/step_time.py), and not from these. ZeRO's formulas are in zero.py.
"""

from __future__ import annotations

from typing import Literal

from gradus.planner.zero import ZeroBytes, zero_bytes

SECONDS_OF_A_DAY = 86_400
FLOPS_OF_A_PF_DAY = 1e15 * SECONDS_OF_A_DAY


def anatomy_bytes(
    parameters: int,
    zero: int,
    ranks: int,
    *,
    low: int = 2,
    high: int = 4,
    gradient: int | None = None,
    activations: float = 0.0,
) -> float:
    """M = M_m + M_o + M_g + M_a, the anatomy of a rank's memory in training."""
    state: ZeroBytes = zero_bytes(parameters, zero, ranks, low=low, high=high, gradient=gradient)
    return state.parameters + state.optimizer + state.gradients + activations


def anatomy_activation_bytes(sequence: int, batch: int, width: int, heads: int, layers: int, *, low: int = 2) -> float:
    """M_a ≈ s·b·h·L·([16·k_l + 2] + [2·k_l + 1]·a·s/h)."""
    each = (16 * low + 2) + (2 * low + 1) * heads * sequence / width
    return sequence * batch * width * layers * each


def largest_model(memory_bytes: float, zero: int, ranks: int, model_parallel: int = 1) -> float:
    """Parameters whose state in mixed precision with Adam fills so much memory (arXiv:1910.02054, table 2)."""
    return memory_bytes / (zero_bytes(10**9, zero, ranks).total / 1e9) * model_parallel


def layer_activation_bytes(
    sequence: int,
    batch: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Of one transformer layer, in 16 bits, with dropout (Korthikanti et al. 2022, arXiv:2205.05198, table 2).

    Here `selective` is theirs: the inside of attention is computed again. With flash attention, which never writes the
    scores, that is what is kept in any case.
    """
    scores = 5 * heads * sequence / width if recompute == "none" else 0.0
    if recompute == "full":
        each = 2.0
    elif sequence_parallel:
        each = (34 + scores) / tensor
    else:
        each = 10 + (24 + scores) / tensor
    return sequence * batch * width * each


def pipeline_activation_bytes(layer_bytes: float, layers: int, ways: int, stages_per_rank: int = 1) -> float:
    """On the first rank of a 1F1B pipeline, which has most micro-batches in flight (arXiv:2205.05198, section 4.2.3).

    It holds as many as there are stages, and so the activations of all layers once; interleaved stages add to that.
    """
    more = (ways - 1) / (ways * stages_per_rank) if stages_per_rank > 1 else 0.0
    return layer_bytes * layers * (1 + more)


def training_flops(parameters: float, tokens: float, per_parameter_and_token: float = 6) -> float:
    """A multiplication and an addition in forward, twice that in backward; T5, half of which sees a token, 3
    (Brown et al. 2020, arXiv:2005.14165, table D.1)."""
    return parameters * tokens * per_parameter_and_token


def training_days(parameters: float, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """8·T·P / (n·X): forward is computed twice (Narayanan et al. 2021, arXiv:2104.04473, equation 4)."""
    return training_flops(parameters, tokens, 8) / (gpus * flops_per_gpu) / SECONDS_OF_A_DAY

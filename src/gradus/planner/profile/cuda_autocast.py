"""CUDA's autocast: which functions it casts the arguments of, to what, and what it keeps of that.

The lists are those of ATen/autocast_mode.h (torch 2.11 to 2.13), which differ from those of the CPU. A function in a
list is run with its arguments cast, and without autocast inside. One that is in none of them runs as it is called, and
autocast reaches what it is made of; the few that are made of listed functions have their entries here as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


LOWER_PRECISION = _names(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul __matmul__ einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention "
    # made of those above
    "linalg_matmul inner"
)
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
    # made of those above
    "nll_loss_nd square pairwise_distance __pow__ __rpow__ arccos arcsin special_expm1 special_log1p "
    "special_logsumexp"
)
# These are told to give float32 unless a dtype was asked for. Their argument is not cast.
FLOAT32_RESULT = _names(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm linalg_norm "
    "special_softmax special_log_softmax"
)
# All arguments in the widest of their formats.
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
REFUSED = frozenset(("binary_cross_entropy",))


class Casts:
    """Casts as CUDA's autocast would, and keeps copies of parameters until the autocast region ends."""

    def __init__(self) -> None:
        self._copies: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id of the parameter, which stays valid while it is kept

    def forget(self) -> None:
        """The copies go. Torch calls this when the outermost region is left."""
        self._copies.clear()

    def arguments(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What a function gets inside an autocast region."""
        if name in LOWER_PRECISION:
            return self.cast(args, lower_precision()), self.cast(kwargs, lower_precision())
        if name in FLOAT32:
            return self.cast(args, torch.float32), self.cast(kwargs, torch.float32)
        if name in WIDEST:
            widest = _widest(tensors_in((args, kwargs)))
            return self.cast(args, widest), self.cast(kwargs, widest)
        if name in FLOAT32_RESULT and _wants_float32(args, kwargs):
            return args, {**kwargs, "dtype": torch.float32}
        if name in REFUSED:
            raise RuntimeError(f"torch refuses {name} under autocast: use binary_cross_entropy_with_logits")
        return args, kwargs

    def cast(self, tree: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda x: self._one(x, dtype) if isinstance(x, Tensor) else x, tree)

    def _one(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not casts(tensor) or tensor.dtype == dtype:
            return tensor
        kept = (
            dtype == lower_precision()
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not kept:
            return tensor.to(dtype)
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, tensor.to(dtype))
        return self._copies[id(tensor)][1]


def is_on() -> bool:
    """Whether this is inside an autocast region. Tensors are on the CPU here, so that is where regions are entered."""
    return torch.is_autocast_enabled("cpu")


def lower_precision() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def casts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _wants_float32(args: Any, kwargs: dict[str, Any]) -> bool:
    given = tensors_in((args, kwargs))
    dtypes = [x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)]
    return not dtypes and bool(given) and casts(given[0])


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    if any(casts(tensor) and tensor.dtype == torch.float32 for tensor in tensors):
        return torch.float32
    return lower_precision()

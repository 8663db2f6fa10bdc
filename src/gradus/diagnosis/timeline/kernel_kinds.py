"""Kinds of kernels, told by their names: who talks to other ranks, what multiplies matrices, and on which units.

Names are those that cuBLAS, cuDNN, CUTLASS, NCCL, Triton and flash attention give their kernels. No name says more than
its author meant it to: where it is silent, the answer is "not known".
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["compute", "communication", "copy"]

COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|nvshmem|c10d|all_?reduce.*(?:one|two)_shot|(?:one|two)_shot_all_reduce", re.I
)
HOST_COMMUNICATION = re.compile(r"^(?:gloo|nccl|mpi|ucc):|^c10d::|^record_param_comms$")

# Products of matrices, convolutions and attention.
MATMUL = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|wgmma|cublas|mma_|_mma|convolve|conv2d|conv3d|scudnn|wgrad|dgrad|fprop|winograd"
    r"|implicit_convolve|flash|fmha|attention_kernel|cudnn_generated_fort_native_sdpa|triton_.*_mm|bmm",
    re.I,
)
# What is certainly not, though its name may look like it.
_NO_MATMUL = re.compile(
    r"splitkreduce|split_k_reduce|elementwise|nchwtonhwc|nhwctonchw|nchwToNhwc|nhwcToNchw|im2col|col2im"
    r"|transpose_kernel|cudnn::ops|winograd_transform|dot_kernel",
    re.I,
)
# cuBLAS writes the shape of the instruction (s16816 is m16n8k16 with sums in fp32), CUTLASS "tensorop"; on Hopper and
# later, nvjet and wgmma are tensor-core kernels by design. Triton's products use them by default.
_TENSOR_CORES = re.compile(
    r"tensorop|(?<![a-z])[shibfz]+(?:16816|1688|884|161616|16832|64x\d+x\d+)|nvjet|wgmma|xmma|hmma|imma|hgmma|qgmma"
    r"|tensor16x|tf32|bf16_s\d|gemm_bf16|gemm_f16|gemm_fp8|e4m3|e5m2|h\d{3,}gemm|(?:fp16|hgemm)_?|flash|fmha"
    r"|sdpa_sm\d+|s\d{4,}gemm|_s16816|_h16816|sm\d+_xmma",
    re.I,
)
# What multiplies with ordinary arithmetic.
_NO_TENSOR_CORES = re.compile(
    r"sgemm|dgemm|cgemm|zgemm|sgemv|gemv|_scudnn_|scudnn|implicit_convolve_sgemm|winograd|gemmsn|gemmk1"
    r"|dot_kernel",
    re.I,
)
# The same, though other parts of the name may say tensor cores: SIMT kernels; and those that may load only one or two
# numbers at a time, since sizes are no multiples of 8, and so cannot feed the tensor cores that they have.
_IN_NAME_ONLY = re.compile(r"simt|ffma|xmma_gemm_f32f32_f32f32_f32_|_align[12](?!\d)", re.I)


def kind_of(name: str) -> Kind:
    """Of a kernel. Copies are told by their category in the trace, and not here."""
    return "communication" if COMMUNICATION.search(name) else "compute"


def is_matmul(name: str) -> bool:
    return MATMUL.search(name) is not None and _NO_MATMUL.search(name) is None and kind_of(name) == "compute"


def uses_tensor_cores(name: str) -> bool | None:
    """None: no product of matrices, or the name does not tell.

    >>> uses_tensor_cores("ampere_sgemm_128x64_nn")
    False
    >>> uses_tensor_cores("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn")
    True
    >>> uses_tensor_cores("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align1")
    False
    """
    if not is_matmul(name):
        return None
    if _IN_NAME_ONLY.search(name):
        return False
    # First what says tensor cores: "cutlass_80_tensorop_s1688gemm_128x64" has "gemm" after an s, too.
    if _TENSOR_CORES.search(name):
        return True
    return False if _NO_TENSOR_CORES.search(name) else None

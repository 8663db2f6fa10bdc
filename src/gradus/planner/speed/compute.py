"""Compute: how long an operator takes on a device. No torch.

A roofline: the longer of its floating-point operations at the rate that its shape allows and its bytes at the bandwidth
that its kind reaches, and never less than the device needs for any kernel.

A matrix product is cut into tiles, which the multiprocessors of a device work off in waves: the last wave may be nearly
empty, and a tile at the edge mostly padding. What it computes, it writes when it is done, and only then. All tile
shapes that libraries choose from are tried, and the fastest counts, as the libraries' own choice does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from gradus.parallel.support import THIN_CHANNELS, THIN_NUMBERS
from gradus.planner.profile.program import Amount, Operator, Storage
from gradus.planner.speed.device import Attention, Device

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Rows and columns of a tile, and what of the rate it reaches: a smaller one reads more for each operation.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (192, 128, 0.98),
    (128, 192, 0.98),
    (128, 128, 0.95),
    (64, 256, 0.85),
    (256, 64, 0.85),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
)
PLAIN_TILES = ((128, 128, 1.0), (64, 128, 1.0), (128, 64, 1.0), (64, 64, 0.9), (32, 32, 0.6))  # without tensor cores
SPLITS = (1, 2, 4, 8, 16)  # ways to cut the inner dimension where there are too few tiles
SHORTEST_SPLIT = 256
HIDDEN_WRITES = 0.3  # of the shorter of computing and writing
# Rows that do not begin at a multiple of 16 bytes are loaded piecemeal: how many elements that are, and how many times
# as long it takes where their number is even, and where it is odd. Measured on an H200: a vocabulary of 30,522 (bert),
# and products of 197 × 197.
UNALIGNED = {"bf16": (8, 2.8, 4.2), "fp16": (8, 2.8, 4.2), "tf32": (4, 1.9, 1.9)}
# Tensor cores take TF32 only along the inner dimension (PTX ISA, wgmma: other orders are for 16 bits). Where neither
# factor lies so, as in the gradient of a layer's weights: 4.02 ms for 8192 × 8192 × 8192 on an H200, beside 2.54 ms.
TURNED_TF32 = 1.55
SLOW_ROWS = 14.0  # what a row of an embedding's gradient costs beside a row of its table, on an H200
# Causal attention computes blocks on the diagonal whole. So many keys of each query more than it needs: measured on an
# H200, flash attention of 512 to 8,192 tokens (see hardware/speeds.yaml).
CAUSAL_WASTE = 190
# Measured on an H200: batch norm of 64 channels against 256, layer norm of 96 to 768 numbers.
FULL_CHANNELS, FULL_ROW = 256, 768
ATTENTION_BLOCK = 128  # queries that a multiprocessor takes at a time
WIDTH_STEP = 32  # to a multiple of which attention kernels pad a head
# Convolutions of an image's three channels leave tensor cores empty: 24 to 33 TFLOP/s in any precision on an H200, of
# its 67 in fp32.
FEW_CHANNELS = 0.42
# Compiled, they have kernels of our own (training/thin_convolution.py), with 146 of the 989 TFLOP/s of an H200 in bf16.
THIN_CONVOLUTION = 0.15
# Of how many numbers such windows are; a square one of more channels hardly ever has as many.
THIN_WINDOWS = {c * w * w for c in range(1, THIN_CHANNELS + 1) for w in range(1, 17) if c * w * w <= THIN_NUMBERS}
CONVOLUTION_KERNELS = 2.0  # launches besides the one that computes, for padding, layouts and sums


@dataclass(frozen=True)
class Setting:
    """Where, and in which share of a layer, an operator runs."""

    device: Device
    micro_batch: float
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True
    expert: int = 1
    compiled: bool = False
    watched: bool = False  # by selective recompute, operator by operator

    def share(self, divided: Operator | Storage) -> float:
        """By how much a tensor group divides the operator's work, or a piece of memory."""
        if divided.divides == "tensor" or (divided.divides == "sequence" and self.sequence_parallel):
            return float(self.tensor)
        return 1.0

    def compiles(self, operator: Operator) -> bool:
        return self.compiled and not operator.eager

    def size(self, amount: Amount) -> float:
        """For the samples of a micro-batch, of which context parallelism leaves a rank some tokens."""
        return amount.fixed + amount.per_sample * self.micro_batch / self.context


def seconds(operator: Operator, setting: Setting) -> float:
    """On the device, once it is there."""
    if operator.kernels == 0:
        return 0.0
    device = setting.device
    share = setting.share(operator)
    floor = device.speeds.kernel_seconds * operator.kernels
    if operator.kind == "matmul" and len(operator.shape) == 4:
        shape = _divided(operator, setting, share)
        turned = setting.size(operator.turned) > 0.9 * setting.size(operator.read) > 0
        precision, padded = device.precision_of(operator.dtype), setting.compiles(operator)
        return floor + matmul_seconds(*shape, precision, device, turned=turned, padded=padded)
    moved = _moved(operator, setting) / share
    if operator.kind == "attention" and len(operator.shape) == 6:
        return floor + _attention(operator, setting, share, moved)
    if operator.kind == "convolution" and len(operator.shape) == 4:
        return floor + _convolution(operator, setting, share, moved) + turning_seconds(operator, setting) / share
    moving = moved / (device.bytes_per_second * bandwidth_share(operator, setting))
    moving += turning_seconds(operator, setting) / share
    if operator.kind == "recurrent" and operator.flops != (0.0, 0.0):
        precision = device.precision_of(operator.dtype)
        shares = device.speeds.recurrent
        rate = device.peak_of(precision) * shares.get(precision, shares["fp32"])
        return floor + max(moving, setting.size(operator.flops) / share / rate)
    return floor + moving


# --- bytes

# What looks up rows reads as many as it hands on, whatever the table it looks in.
_LOOKING_UP = {"embedding", "index", "_unsafe_index", "gather", "index_select", "nll_loss_forward", "_embedding_bag"}
# What fills in a few values of a new tensor reads next to nothing.
_FILLING = {"nll_loss_backward", "gather_backward", "index_select_backward", "slice_backward", "select_backward"}


def _moved(operator: Operator, setting: Setting) -> float:
    """Bytes that go through memory."""
    read, written = setting.size(operator.read), setting.size(operator.written)
    if operator.name in _FILLING:
        return written
    if operator.name in _LOOKING_UP:
        return min(read, written) + written
    if operator.name == "embedding_dense_backward":  # a table of zeros, to which rows are added slowly
        return written + SLOW_ROWS * read
    return read + written


def bandwidth_share(operator: Operator, setting: Setting) -> float:
    """What of the quoted bandwidth an operator reaches: by its name, else by its kind."""
    shares = setting.device.speeds.bandwidth
    if setting.compiles(operator) and operator.kind in ("pointwise", "reduction", "copy", "random"):
        return shares["compiled"]
    precision = "16" if operator.dtype in ("bfloat16", "float16") else "32"
    layout = " channels_last" if operator.channels_last else ""
    for key in (f"{operator.name} {precision}{layout}", f"{operator.name} {precision}", operator.name):
        if key in shares:
            return shares[key] * _narrowness(operator)
    kind = _pointwise_kind(operator) if operator.kind == "pointwise" else operator.kind
    return shares.get(kind, shares["pointwise"])


def turning_seconds(operator: Operator, setting: Setting) -> float:
    """That it takes longer because inputs lie in another order: neighbours in one are far apart in the other.

    What is compiled is read as it lies, by the kernel that made it or that needs it.
    """
    turned = setting.size(operator.turned)
    if not turned or setting.compiles(operator):
        return 0.0
    device = setting.device
    shares = device.speeds.bandwidth
    slow = shares["turned 16" if operator.dtype in ("bfloat16", "float16") else "turned 32"]
    if operator.kind == "copy":  # the time of the whole copy, less what it would take otherwise
        moved = _moved(operator, setting) / device.bytes_per_second
        return max(0.0, moved / slow - moved / bandwidth_share(operator, setting))
    if operator.kind == "pointwise":
        return turned / device.bytes_per_second * (1 / slow - 1 / shares["pointwise"])
    return device.speeds.kernel_seconds + 2 * turned / (device.bytes_per_second * slow)  # a copy of its own before


def _narrowness(operator: Operator) -> float:
    """Norms do one row, or one channel of images, at a time: short ones leave most of a multiprocessor idle.

    How long they are is told by the weights that are read with them: two numbers for each element of a row; of batch
    norm, four or five for each channel.
    """
    backward = operator.name.endswith("backward")
    if "batch_norm" in operator.name and not operator.channels_last:
        channels = operator.read.fixed / ((5 if backward else 4) * 4)
        return min(1.0, (channels / FULL_CHANNELS) ** (0.8 if backward else 0.6)) if channels else 1.0
    if "layer_norm" in operator.name:
        width = operator.read.fixed / (4 if backward else 8)
        return min(1.0, (width / FULL_ROW) ** (0.25 if backward else 0.75)) if width else 1.0
    return 1.0


def _pointwise_kind(operator: Operator) -> str:
    """Kernels whose inputs are of another shape or type than the output handle one element at a time."""
    read, written = (amount.per_sample or amount.fixed for amount in (operator.read, operator.written))
    times = read / written if written else 1.0
    if 0.95 < times < 1.05:  # as much is read as written: by one input, or by one and a narrower one
        narrower = len(operator.reads) > 1 or (operator.read.fixed > 0 and operator.written.fixed == 0)
        return "broadcast" if narrower else "pointwise"
    return "mixed" if times > 0.5 and abs(times - round(times)) > 0.05 else "pointwise"


# --- matrix products


def _divided(operator: Operator, setting: Setting, share: float) -> tuple[float, float, float, float]:
    """The shape of a rank's part. Of a batch of products a rank does some; of one product, the widest dimension of
    weights is what a tensor group divides (the inner one, where both are alike: the second layer of a pair)."""
    batch, m, n, k = (max(1.0, setting.size(amount)) for amount in operator.shape)
    if operator.expert and setting.expert > 1 and batch >= setting.expert:
        batch, m = batch / setting.expert, m * setting.expert
    if share == 1:
        return batch, m, n, k
    if batch >= share:
        return batch / share, m, n, k
    sizes = {"k": k, "n": n, "m": m}
    fixed = {"m": operator.shape[1], "n": operator.shape[2], "k": operator.shape[3]}
    able = [name for name in sizes if fixed[name].per_sample == 0] or list(sizes)
    sizes[max(able, key=lambda name: sizes[name])] /= share
    return batch, sizes["m"], sizes["n"], sizes["k"]


def matmul_seconds(
    batch: float,
    m: float,
    n: float,
    k: float,
    precision: str,
    device: Device,
    *,
    turned: bool = False,
    padded: bool = False,
) -> float:
    """Of `batch` products of m×k with k×n, without the floor of a launch.

    `turned`: neither factor lies along the inner dimension. `padded`: rows are made longer where a product is bound by
    computing and not by memory, as torch.compile does (torch/_inductor/fx_passes/pad_mm.py).
    """
    speeds = device.speeds
    rate = device.peak_of(precision) * speeds.matmul.get(precision, speeds.matmul["bf16"])
    bandwidth = device.bytes_per_second * speeds.bandwidth["matmul"]
    item = ITEM_BYTES[precision]
    written = batch * m * n * max(2, item)
    busy = tiled_seconds(batch, m, n, k, rate, precision, device)
    if turned and precision == "tf32":
        busy *= TURNED_TF32
    # While some tiles are written, others are computed: the more tiles there are, the more of it.
    together = HIDDEN_WRITES * min(busy, written / bandwidth)
    found = max(busy + written / bandwidth - together, (batch * item * (m * k + k * n) + written) / bandwidth)
    every, if_even, if_odd = UNALIGNED.get(precision, (1, 1.0, 1.0))
    rows = [size for size in ((m, n) if turned else (n, k)) if size % every]
    worth_it = 1 / (1 / m + 1 / n + 1 / k) > device.peak_of(precision) / device.bytes_per_second
    if not rows or (padded and worth_it):
        return found
    return found * (if_odd if any(size % 2 for size in rows) else if_even)


def tiled_seconds(batch: float, m: float, n: float, k: float, rate: float, precision: str, device: Device) -> float:
    """Until all tiles are computed, at so many FLOP/s of the whole device, the best way to cut."""
    units = device.multiprocessors
    lost = device.speeds.inner_lost
    best = math.inf
    for rows, columns, reached in PLAIN_TILES if precision in ("fp32", "fp64") else TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        work = 2.0 * rows * columns * units / (rate * reached)
        for split in SPLITS:
            if split > 1 and (k / split < SHORTEST_SPLIT or tiles * split > 2 * units):
                break
            waves = tiles * split / units
            # Later waves mix: a multiprocessor takes the next tile as soon as it is done with one.
            counted = math.ceil(waves) if waves <= 1 else 0.5 * (math.ceil(waves) + waves)
            busy = counted * work * (k / split + lost)
            if split > 1:  # partial sums are written and read once more
                busy += batch * m * n * 4.0 * split / device.bytes_per_second
            best = min(best, busy)
    return best


# --- attention


def _attention(operator: Operator, setting: Setting, share: float, moved: float) -> float:
    device = setting.device
    name = next((kind for kind in ("cudnn", "efficient") if kind in operator.name), "flash")
    samples, heads, _, queries, keys, width = (amount.at(setting.micro_batch) for amount in operator.shape)
    return attention_seconds(
        flops=setting.size(operator.flops) / share,
        moved=moved,
        blocks=samples * heads / share * math.ceil(queries / setting.context / ATTENTION_BLOCK),
        queries=queries,
        keys=keys,
        width=width,
        causal=operator.causal,
        backward=operator.name.endswith("backward"),
        speeds=device.speeds.attention[name],
        # The memory-efficient kernels leave TF32 alone.
        peak=device.peak_of("fp32" if operator.dtype == "float32" else device.precision_of(operator.dtype)),
        precision="fp32" if operator.dtype == "float32" else "16 bit",
        device=device,
    )


def attention_seconds(
    *,
    flops: float,
    moved: float,
    blocks: float,
    queries: float,
    keys: float,
    width: float,
    causal: bool,
    backward: bool,
    speeds: Attention,
    peak: float,
    precision: str,
    device: Device,
) -> float:
    """Scores are computed in blocks: the last of a sequence is padded, and those on the diagonal are computed whole.

    What is read and written comes on top, in backward several times over: sums of gradients go through memory.
    """
    waste = math.ceil(keys / 64) * 64 / keys * math.ceil(width / WIDTH_STEP) * WIDTH_STEP / width
    if causal:
        waste *= 1 + CAUSAL_WASTE / max(queries, keys)
    shares = speeds.backward if backward else speeds.forward
    reached = _by_width(shares, width) if precision != "fp32" else speeds.fp32
    waves = blocks / device.multiprocessors
    idle = math.ceil(waves) / waves if waves < 1 else 1.0
    times = speeds.moved_backward if backward else speeds.moved_forward
    return flops * waste * idle / (peak * reached) + times * moved / device.bytes_per_second


def _by_width(shares: Mapping[int, float], width: float) -> float:
    """Between the widths of heads that are known; beyond them, as the nearest, or less where heads are narrower."""
    known = sorted(shares.items())
    if width <= known[0][0]:
        return known[0][1] * width / known[0][0]
    for (low, at_low), (high, at_high) in pairwise(known):
        if width <= high:
            return at_low + (at_high - at_low) * (width - low) / (high - low)
    return known[-1][1]


# --- convolutions


def _convolution(operator: Operator, setting: Setting, share: float, moved: float) -> float:
    groups, m, n, k = (setting.size(amount) for amount in operator.shape)
    backward = "backward" in operator.name
    one = 2.0 * groups * m * n * k
    ways = max(1, round(setting.size(operator.flops) / one)) if one else 1
    precision = setting.device.precision_of(operator.dtype)
    found = convolution_seconds(
        groups,
        m,
        n,
        k,
        moved / ways,
        precision,
        setting.device,
        backward=backward,
        channels_last=operator.channels_last,
        # There is none for the gradient by the images, which is the second way.
        has_own_kernel=setting.compiles(operator) and precision in ("bf16", "fp16") and ways == 1,
    )
    # Backward is two of them: for the input, and for the weights.
    return found * ways / share + _bias(operator, setting, groups * n * k, groups * m * n) / share


def _bias(operator: Operator, setting: Setting, weights: float, outputs: float) -> float:
    """Seconds to add a convolution's bias, which is a kernel of its own, or to add up the gradient of one."""
    device, item = setting.device, ITEM_BYTES[setting.device.precision_of(operator.dtype)]
    backward = "backward" in operator.name
    if (operator.written if backward else operator.read).fixed <= item * weights * 1.0001:
        return 0.0
    share = device.speeds.bandwidth["sum" if backward else "pointwise"]
    moved = item * outputs * (1 if backward else 2)
    return device.speeds.kernel_seconds + moved / (device.bytes_per_second * share)


def convolution_seconds(
    groups: float,
    m: float,
    n: float,
    k: float,
    moved: float,
    precision: str,
    device: Device,
    *,
    backward: bool,
    channels_last: bool,
    has_own_kernel: bool = False,
) -> float:
    """As the matrix product that it amounts to; `moved` are bytes of input, weights and output.

    Tensor cores want channels last: otherwise inputs and outputs are turned around, before and after. `has_own_kernel`:
    if it is of a few channels, and such that the kernels of our own can do it.
    """
    speeds = device.speeds
    floor = CONVOLUTION_KERNELS * speeds.kernel_seconds
    bandwidth = device.bytes_per_second * speeds.bandwidth["matmul"]
    flops = 2.0 * groups * m * n * k
    if groups > 1 and n <= 1:  # each channel by itself: no product of matrices
        key = f"{precision} channels_last" if channels_last else precision
        shares = speeds.depthwise_backward if backward else speeds.depthwise
        rate = device.peak_of("fp32") * shares.get(key, shares.get(precision, shares["fp32"]))
        return floor + max(flops / rate, moved / bandwidth)
    if k % 4:  # a few channels: three, mostly
        own = has_own_kernel and channels_last and groups == 1 and k in THIN_WINDOWS
        rate = device.peak_of(precision) * THIN_CONVOLUTION if own else device.peak_of("fp32") * FEW_CHANNELS
        return floor + max(flops / rate, moved / bandwidth)
    shares = speeds.convolution_backward if backward else speeds.convolution
    share = shares.get(
        f"{precision} channels_last" if channels_last else precision, shares.get(precision, shares["bf16"])
    )
    busy = tiled_seconds(groups, m, n, k, device.peak_of(precision) * share, precision, device)
    turned = 0.0
    if precision != "fp32" and not channels_last:
        item = ITEM_BYTES[precision]
        # One position at a time, with nothing left out, is a matrix product of images as they lie.
        as_it_lies = abs(moved - item * (m * k + n * k + m * n)) < 0.01 * moved
        turned = (0.3 if as_it_lies else 1.0) * 2 * moved / (device.bytes_per_second * speeds.bandwidth["turned"])
    return floor + max(busy, moved / bandwidth) + turned


# --- the host


def host_seconds(operator: Operator, setting: Setting) -> float:
    """That the host needs to launch an operator: in eager mode Python, dispatch and autograd; of a compiled graph, a
    call for each kernel."""
    speeds = setting.device.speeds
    if operator.kernels == 0:
        return 0.0
    if setting.compiles(operator):
        return speeds.host_compiled_seconds * operator.kernels
    layer = operator.kind in _WITH_LAYERS or "norm" in operator.name
    return speeds.host_layer_seconds if layer else speeds.host_operator_seconds


# What a layer of its own stands behind, with parameters, views and several nodes of autograd's graph; and what picks
# rows, with checks of its indices and several operators inside.
_WITH_LAYERS = ("matmul", "convolution", "attention", "recurrent", "lookup")

"""Program: what a model does to a device in one pass forward and backward, as data. No torch.

A model is a few parts that are called one after another: what comes before its repeated blocks, the blocks, what comes
after them. Blocks that are alike are one part, called many times. A part lists its operators in the order in which
they run, first those of forward, then those that compute forward again (as traced there are none), then those of
backward, and the pieces of memory that they read and write. From that alone follow the time of a pass on any device,
the memory at any moment, and what recomputing, compiling or dividing the part would change.

Sizes grow with the samples of a micro-batch: every one is an `Amount`, a fixed part and a part for each sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# What runs. A matmul has the shape (batch, m, n, k) and computes batch products of m×k with k×n. Attention has the
# shape (samples, heads, key-value heads, queries, keys, width of a head). A convolution has the shape of the matmul
# that it amounts to: (groups, output positions of all samples, output channels, kernel volume × input channels).
Kind = Literal["matmul", "attention", "convolution", "recurrent", "pointwise", "reduction", "lookup", "copy", "random"]

# How something shrinks when a layer is divided over a tensor group.
#   tensor    it belongs to the divided layers: by the ranks of the group
#   sequence  it lies between them: by the same, but only where the sequence is divided too (sequence_parallel)
#   whole     every rank of the group has all of it
Divides = Literal["tensor", "sequence", "whole"]

# What a piece of memory is for.
#   activation  what the model computes
#   logits      the output over the vocabulary or the classes, and what the loss makes of it
#   copy        a parameter in a narrower format, as autocast makes and keeps it
#   gradient    of a parameter; it stays until the optimizer has used it
#   workspace   what a library asks for while one operator runs
Role = Literal["activation", "logits", "copy", "gradient", "workspace"]


class Amount(NamedTuple):
    """A size: so much in any case, and so much for each sample of a micro-batch."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, micro_batch: float) -> float:
        return self.fixed + self.per_sample * micro_batch

    def plus(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def times(self, factor: float) -> Amount:
        return Amount(self.fixed * factor, self.per_sample * factor)


NOTHING = Amount()


@dataclass(frozen=True)
class Operator:
    """One call of an operator. In eager mode that is `kernels` launches on the device, one after another."""

    name: str  # as torch calls it, without the namespace: "mm", "_scaled_dot_product_flash_attention"
    kind: Kind
    flops: Amount  # a multiplication and an addition are two; of causal attention, half of all pairs
    read: Amount  # bytes of distinct inputs, in memory order as they lie there
    written: Amount  # bytes of outputs
    dtype: str  # what it computes in: "bfloat16", "float32", "float8_e4m3fn"
    shape: tuple[Amount, ...] = ()  # see Kind; empty for those not listed there
    kernels: int = 1
    reads: tuple[int, ...] = ()  # storages of the part, by their number in `Part.storages`
    writes: tuple[int, ...] = ()
    divides: Divides = "sequence"
    expert: bool = False  # works on tokens that were sent to an expert
    causal: bool = False  # attention only
    channels_last: bool = False  # of images: how they lie in memory
    eager: bool = False  # in no module that a plan with `compile` compiles
    module: str = ""  # that it belongs to, by its name in the model; of blocks that are alike, in the first
    turned: Amount = NOTHING  # bytes of inputs whose innermost dimension is not the one that a kernel goes along


@dataclass(frozen=True)
class Storage:
    """A piece of memory. It is there from operator `made` until operator `last` is done, both by number in the part.

    `made` -1: it was there when the part was called (an input, which belongs to the part that made it; a parameter is
    not listed at all). `last` equal to the number of forward operators: it goes as soon as backward of this part
    begins; if it is a copy and nothing reads it any more, as soon as forward of the model ends, when autocast forgets
    it. `last` equal to the number of all operators: it outlives the part's backward, as gradients do.
    """

    bytes: Amount
    made: int
    last: int
    role: Role = "activation"
    divides: Divides = "sequence"
    expert: bool = False
    from_samples: float = 0.0  # with fewer in a micro-batch, it is not needed


@dataclass(frozen=True)
class Weights:
    """Parameters of a part that are alike in everything but their values, added up."""

    elements: int
    trained: bool = True
    divides: Divides = "whole"  # "tensor": a rank of a tensor group has its share
    expert: bool = False  # they belong to one of several experts, which are dealt out over mesh.expert
    tensors: int = 1  # how many parameters these are


@dataclass(frozen=True)
class Part:
    """What one call of a part of the model does, forward and backward."""

    name: str  # "blocks.0", "before the blocks"
    block: bool  # one of the repeated blocks: what pipelines cut, recompute repeats and zero 3 gathers
    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    storages: tuple[Storage, ...] = ()
    weights: tuple[Weights, ...] = ()
    output: Amount = NOTHING  # bytes that the next part gets: what a pipeline sends between stages
    # Bytes that a tensor group exchanges in forward, for each all-gather at the entry of divided layers and each
    # reduce-scatter at their exit (all-reduces, without sequence_parallel); backward does the same the other way round.
    gathered: tuple[Amount, ...] = ()
    scattered: tuple[Amount, ...] = ()
    keys_and_values: Amount = NOTHING  # bytes that context parallelism sends around in forward
    sent_to_experts: Amount = NOTHING  # bytes of one all-to-all; forward has two of them, backward too
    spared: bool = False  # it is not recomputed, whatever the plan does with other blocks: see spared_blocks.py
    waits: int = 0  # how often the host reads a value in forward, and waits for the device to have it
    recompute: tuple[Operator, ...] = ()  # what of forward runs again when backward begins; see planner/recomputing.py

    @property
    def operators(self) -> tuple[Operator, ...]:
        """In the order in which they run: this is what storages count by."""
        return self.forward + self.recompute + self.backward

    @property
    def parameters(self) -> int:
        return sum(weights.elements for weights in self.weights)

    @property
    def trained(self) -> int:
        return sum(weights.elements for weights in self.weights if weights.trained)

    def kept(self) -> Iterator[Storage]:
        """What forward leaves in memory for backward."""
        ends = len(self.forward)
        return (s for s in self.storages if 0 <= s.made < ends <= s.last)


@dataclass(frozen=True)
class ModelProfile:
    """A model as parts and the order in which forward calls them. Backward goes the other way."""

    name: str
    parts: tuple[Part, ...] = ()
    calls: tuple[int, ...] = ()  # numbers of parts; blocks that are alike are called under one number
    precision: str = "fp32"  # that it was traced in, as in the plan
    narrow_parameters: bool = False  # whether parameters were in 16 bit already, as shards are when they are gathered
    micro_batches: tuple[int, int] = (1, 2)  # it was traced with these; beyond, sizes are on a straight line
    tokens_per_sample: int | None = None
    sample_bytes: float = 0.0  # of one sample as the loader hands it over
    input_bytes: float = 0.0  # of tensors that are made of it for the model: of images, numbers in place of bytes
    tied_elements: int = 0  # parameters that two parts share, counted in the first of them only
    traced: bool = True  # False: a fallback from parameters alone; `notes` says why
    notes: tuple[str, ...] = field(default=())
    module_parameters: tuple[tuple[str, int], ...] = ()  # elements of each module's own, by its name
    tied_trained: int = 0  # of tied_elements, those that are trained
    # Of each call of a block, its number in order of registration, by which parallel/recompute.py counts. A model may
    # call its blocks in another order, or one of them often. Empty: one after the other.
    block_order: tuple[int, ...] = ()
    loss_tokens: float = 0.0  # of a sample, whose loss is computed in parts; 0: it is not
    class_name: str = ""  # of the model, which a function of another name may have built
    # How it failed with parameters in 16 bit, which were asked for: this is the trace of those that it has.
    narrow_failure: str = ""

    def called(self) -> Iterator[Part]:
        """The parts in the order of forward, each as often as it is called."""
        return (self.parts[number] for number in self.calls)

    @property
    def blocks(self) -> list[Part]:
        return [part for part in self.called() if part.block]

    @property
    def block_numbers(self) -> tuple[int, ...]:
        """Which block each call of one is of."""
        return self.block_order or tuple(range(len(self.blocks)))

    @property
    def block_count(self) -> int:
        """As many as are registered, however often each is called."""
        return 1 + max(self.block_numbers, default=-1)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.called())

    @property
    def trained(self) -> int:
        return sum(part.trained for part in self.called())

    def last_product(self, micro_batch: float) -> tuple[int, int] | None:
        """Rows and columns of the last matrix product of forward: the logits, of a model that has such."""
        if not self.traced or not self.calls:
            return None
        products = [operator for operator in self.parts[self.calls[-1]].forward if operator.kind == "matmul"]
        if not products:
            return None
        count, rows, columns, _ = (size.at(micro_batch) for size in products[-1].shape)
        return round(count * rows), round(columns)

    def flops(self, micro_batch: float) -> float:
        """Of one forward and backward pass, without computing anything twice: not even attention's scores."""
        return sum(needed_flops(op, micro_batch) for part in self.called() for op in part.forward + part.backward)


# Backward of attention is five products of matrices; one of them computes the scores again, which is not the model's.
ATTENTION_NEEDED = 4 / 5


def needed_flops(operator: Operator, micro_batch: float) -> float:
    """Of an operator, without what it computes a second time."""
    again = operator.kind == "attention" and operator.name.endswith("backward")
    return operator.flops.at(micro_batch) * (ATTENTION_NEEDED if again else 1.0)

"""What torch itself saves for backward when it compiles a model: its own partitioner, run on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

aten = torch.ops.aten
VIEWS = {
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten._unsafe_view.default,
    aten.alias.default,
}


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).sum()


def saved_by_torch(model: nn.Module, batch: Tensor) -> int:
    """Bytes, without parameters; of a view, those of what it is a view of."""
    saved: dict[str, int] = {}

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        values = (node.meta.get("val") for node in joint.graph.nodes)
        fake_mode = next(value.fake_mode for value in values if isinstance(value, Tensor))
        with V.set_fake_mode(fake_mode):
            joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)
        given = [node for node in forward.graph.nodes if node.op == "placeholder"]
        parameters = {given[number] for number in options["static_lifetime_input_indices"]}
        *_, output = forward.graph.nodes
        for node in output.args[0][options["num_fwd_outputs"] :]:
            while node.op == "call_function" and node.target in VIEWS:
                node = node.args[0]
            if node not in parameters and isinstance(node.meta.get("val"), Tensor):
                saved[node.name] = node.meta["val"].nbytes
        return forward, backward

    def as_it_is(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    torch.compile(_WithLoss(model), backend=backend, dynamic=False)(batch).backward()
    return sum(saved.values())

"""Activation offload: what autograd saves of a block for backward waits in host memory.

Copies are in the order of the device's own work, so that neither the host nor a copy has to wait for the other.
Parameters stay where they are: they are on the device anyway.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LEAST_BYTES = 64 * 1024  # smaller ones stay: a copy would cost more time than they take memory


def waiting_on_host(block: nn.Module) -> AbstractContextManager[object]:
    """Inside this, tensors that are saved for backward are moved to host memory until backward asks for them."""
    lasting = {_address(tensor) for tensor in (*block.parameters(), *block.buffers())}

    @torch.no_grad()
    def send(tensor: Tensor) -> object:
        plain = _local(tensor)
        if type(plain) not in (Tensor, nn.Parameter) or plain.is_sparse or _address(tensor) in lasting:
            return tensor
        size = plain.numel() * plain.element_size()
        if size < LEAST_BYTES or size > plain.untyped_storage().nbytes():  # expanded: would grow on its way
            return tensor
        host = torch.empty_like(plain, device="cpu", pin_memory=plain.device.type == "cuda")
        host.copy_(plain, non_blocking=True)
        return _Sent(tensor, plain.device, host)

    @torch.no_grad()
    def bring_back(packed: object) -> Tensor:
        if isinstance(packed, _Sent):
            return packed.back()
        assert isinstance(packed, Tensor)
        return packed

    return torch.autograd.graph.saved_tensors_hooks(send, bring_back)


class _Sent:
    """A tensor's values in host memory, and what it takes to make it again."""

    def __init__(self, tensor: Tensor, device: torch.device, host: Tensor) -> None:
        self._device, self._host = device, host
        self._layout = (
            (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
            if isinstance(tensor, DTensor)
            else None
        )

    def back(self) -> Tensor:
        plain = self._host.to(self._device, non_blocking=True)
        if self._layout is None:
            return plain
        mesh, placements, shape, stride = self._layout
        return DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=stride)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: Tensor) -> int:
    with torch.no_grad():
        return _local(tensor).untyped_storage().data_ptr()

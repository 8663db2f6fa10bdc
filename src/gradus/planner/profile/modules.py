"""Modules: a profile as a table of the model's modules: parameters, work, bytes moved, what is kept. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradus.planner.profile.program import ModelProfile, Part, needed_flops


@dataclass(frozen=True)
class ModuleRow:
    """What all calls of a module cost in one pass with a micro-batch. What blocks that are alike do is added up."""

    module: str  # by its name in the model; of blocks that are alike, the first. "" is the model itself, and the loss
    calls: int  # how many modules this row stands for
    parameters: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0  # read and written
    backward_bytes: float = 0.0
    kernels: int = 0
    kept_bytes: float = 0.0  # for backward, parameters left out

    def plus(self, other: ModuleRow) -> ModuleRow:
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in vars(self) if name not in ("module", "calls")
        }
        return replace(self, **sums)


def by_module(profile: ModelProfile, micro_batch: int, depth: int | None = None) -> list[ModuleRow]:
    """A row for each module that does something, in the order of the model; what is below `depth` is added up."""
    called = Counter(profile.calls)
    rows: dict[str, ModuleRow] = {}

    def add(row: ModuleRow) -> None:
        name = ".".join(row.module.split(".")[:depth]) if depth is not None else row.module
        row = replace(row, module=name)
        rows[name] = rows[name].plus(row) if name in rows else row

    for name, elements in profile.module_parameters:
        template, times = _template(profile, called, name)
        if template == name:
            add(ModuleRow(name, times, parameters=elements * times))
    for number, part in enumerate(profile.parts):
        for row in _rows_of(part, called[number], micro_batch):
            add(row)
    return sorted(rows.values(), key=_place(profile))


def _template(profile: ModelProfile, called: Counter[int], name: str) -> tuple[str, int]:
    """The module that stands for this one: the same inside the first of the blocks that are alike; and for how many."""
    for number, part in enumerate(profile.parts):
        if part.block and (name == part.name or name.startswith(f"{part.name}.")):
            return name, called[number]
    return ("", 0) if any(_inside_a_block(part.name, name) for part in profile.parts if part.block) else (name, 1)


def _inside_a_block(block: str, name: str) -> bool:
    """Whether it is in another block of the same list: "blocks.7.mlp" with "blocks.0"."""
    parent, _, number = block.rpartition(".")
    rest = name.removeprefix(f"{parent}.") if parent else name
    return number.isdigit() and rest != name and rest.partition(".")[0].isdigit()


def _rows_of(part: Part, times: int, micro_batch: int) -> list[ModuleRow]:
    rows = []
    for phase, operators in (("forward", part.forward), ("backward", part.backward)):
        for operator in operators:
            moved = operator.read.at(micro_batch) + operator.written.at(micro_batch)
            amounts = {
                f"{phase}_flops": needed_flops(operator, micro_batch) * times,
                f"{phase}_bytes": moved * times,
            }
            rows.append(ModuleRow(operator.module, times, kernels=operator.kernels * times, **amounts))  # type: ignore[arg-type]
    for storage in part.kept():
        made_by = part.forward[storage.made].module
        rows.append(ModuleRow(made_by, times, kept_bytes=storage.bytes.at(micro_batch) * times))
    return rows


def _place(profile: ModelProfile) -> Callable[[ModuleRow], int]:
    """Where a module comes in the model: its first operator, or its parameters. The model itself comes last."""
    order: dict[str, int] = {}
    for part in profile.parts:
        for operator in part.forward:
            order.setdefault(operator.module, len(order))
    for name, _ in profile.module_parameters:
        order.setdefault(name, len(order))

    def place(row: ModuleRow) -> int:
        inside = [at for name, at in order.items() if name == row.module or name.startswith(f"{row.module}.")]
        return min(inside, default=len(order)) if row.module else len(order)

    return place


def modules_text(rows: list[ModuleRow], micro_batch: int) -> str:
    """As a table for people."""
    head = ("module", "parameters", "GFLOP forward", "backward", "MiB moved forward", "backward", "kernels", "MiB kept")
    cells = [
        (
            (row.module or "the model and its loss") + (f" × {row.calls}" if row.calls > 1 else ""),
            f"{row.parameters:,}",
            f"{row.forward_flops / 1e9:,.2f}",
            f"{row.backward_flops / 1e9:,.2f}",
            f"{row.forward_bytes / 2**20:,.1f}",
            f"{row.backward_bytes / 2**20:,.1f}",
            f"{row.kernels:,}",
            f"{row.kept_bytes / 2**20:,.1f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]

    def text(line: tuple[str, ...]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join((line[0].ljust(widths[0]), *numbers))

    title = f"Modules: one pass, forward and backward, with a micro-batch of {micro_batch}, before the plan divides it"
    return "\n".join([title, text(head), *map(text, cells)])

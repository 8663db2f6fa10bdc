"""`gradus models`: the reference models and presets."""

from __future__ import annotations

from gradus.cli.output import print_json
from gradus.models.catalogue import entries


def models_command(as_json: bool) -> int:
    described = [entry.describe() for entry in entries()]
    if as_json:
        print_json(described)
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("settings")
    for entry in described:
        settings = {k: v for k, v in entry.items() if k not in ("name", "kind", "reference", "parameters")}
        shown = " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
        table.add_row(str(entry["name"]), f"{entry['parameters']:,}", shown)
    Console().print(table)
    return 0

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
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("settings")
    defaults = {entry["name"]: entry for entry in described if entry["kind"] == "reference"}
    for entry in described:
        name, reference = str(entry["name"]), str(entry["reference"])
        default = {} if name == reference else defaults[reference]
        shown = " ".join(
            f"{key}={value}"
            for key, value in entry.items()
            if key not in ("name", "kind", "reference", "parameters")
            and value is not None
            and value != default.get(key)
        )
        # A preset is its reference model with a few settings; the rest is as listed there.
        table.add_row(name, f"{entry['parameters']:,}", f"{reference}: {shown or 'as above'}" if default else shown)
    Console().print(table)
    return 0

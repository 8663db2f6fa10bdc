"""docs/bench-h200.md, from what `gpu_bench.py`, `gpu_tune.py`, `gpu_breakdown.py` and `gpu_explain.py` measured.

    python benchmarks/h200_page.py                  # write the page again
    python benchmarks/h200_page.py --take FOLDER... # take new results in first

Results lie in `benchmarks/measured/bench`, without what says whose machine it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradus.hardware.catalogue import find_gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "measured" / "bench"
PAGE = ROOT / "docs" / "bench-h200.md"
Document = dict[str, Any]
TORCH = "2.11.0+cu130"  # of the machine that all of it was measured on, where a result does not say so itself


def take(folder: Path) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text())
        kept = RESULTS / path.name
        if path.name == "gpu_explain.json":
            document = explained(document, path.stat().st_mtime, before=read(kept))
        elif path.name == "gpu_breakdown.json":  # of which a call may measure a part
            document = {**read(kept), **document, "time": path.stat().st_mtime}
        elif document.get("format", "").startswith("gradus-bench"):
            found = document.pop("environment")
            packages = {name: found["packages"][name] for name in ("torch", "triton") if name in found["packages"]}
            machine = {"gpu": found["gpus"][0]["name"] if found["gpus"] else None, "cpu": found["cpu"], **packages}
            document["environment"] = {**machine, "cpu_cores": found["cpu_cores"]}
            document.pop("charts", None)
        else:
            continue
        kept.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> Document:
    return json.loads(path.read_text()) if path.is_file() else {}


def explained(cases: list[Document], time: float, before: Document) -> Document:
    """Of each case what was said first, of the run with the fault and of the one without."""
    rows = {row["case"]: row for row in before.get("rows", [])}
    for case in cases:
        first, *_ = [*case["wrong"]["findings"], None]
        shown = {key: first[key] for key in ("id", "verdict", "change", "gain_at_most")} if first else None
        mended = [finding["id"] for finding in case["clean"]["findings"]]
        rows[case["case"]] = {"case": case["case"], "expected": case["expected"], "first": shown, "mended": mended}
    return {"time": time, "torch": TORCH, "rows": list(rows.values())}


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows)]


def lab(found: list[Document]) -> list[str]:
    def row(one: Document) -> tuple[str, ...]:
        settings, summary = one["settings"], one["summary"]
        layout = ", channels_last" if settings["channels_last"] else ""
        rate, spread = summary["samples_per_second_each"], summary["samples_per_second_each_plus_minus"]
        memory = f"{summary['memory_peak_bytes'] / 2**30:.1f} GiB"
        return f"{settings['precision']}{layout}", f"{rate:,.1f} ± {spread:.1f}", f"{summary['mfu']:.0%}", memory

    first = found[0]["settings"]
    command = f"gradus bench synthetic --model {first['model']} --batch-size {first['batch_size']} --num-iters 5"
    lines = [
        f"`{command} --precision P [--channels-last]`, eager; ± is 1.96 standard deviations of five iterations.",
        "",
    ]
    lines += table(("precision", "img/sec per GPU", "MFU", "peak memory"), [row(one) for one in found])
    peaks = find_gpu("NVIDIA H200")
    assert peaks is not None
    quoted = ", ".join(f"{name} {peaks.peak_tflops[name]:g}" for name in ("fp32", "tf32", "bf16"))
    return [
        *lines,
        "",
        f"MFU is the model's FLOPs over seconds and the quoted dense peak of the row's format ({quoted} TFLOP/s;",
        "NVIDIA H200 datasheet).",
    ]


def device(found: list[Document]) -> list[str]:
    rows = [
        (
            f"{one['group']}: {one['name']}",
            f"{one['value']:,.4g} {one['unit']}",
            f"± {one['spread'] / 2:.1%}",
            f"{one['quoted']:,.4g}" if one["quoted"] is not None else "–",
            f"{one['share']:.0%}" if one["share"] is not None else "–",
        )
        for one in found[0]["rows"]
        if one["value"] is not None
    ]
    sources = sorted({one["source"] for one in found[0]["rows"] if one.get("source")})
    return [
        "`gradus bench device --seconds 0.6`",
        "",
        *table(("what", "measured", "spread", "quoted", "reached"), rows),
        "",
        f"Quoted from: {'; '.join(sources)}.",
    ]


def knobs(found: list[Document]) -> list[str]:
    rows = [
        (
            one["knob"],
            f"{one['speed_ratio']:.2f}×",
            f"± {one['noise']:.0%}",
            f"{one['memory_ratio']:.2f}×",
            f"{'Y' if one['faster'] else 'N'}/{'Y' if one['smaller'] else 'N'}",
            one["claim"],
        )
        for one in found[0]["rows"]
    ]
    columns = ("method", "speed", "noise", "memory", "faster/smaller", "claimed (ICIAP 2025 talk of NVIDIA)")
    settings = found[0]["settings"]
    head = (
        f"`gradus bench knobs --model {settings['recipe']} --batch-size {settings['batch']} "
        f"--repeats {settings['repeats']} --seconds 1.5`; {found[0]['notes'][0]}"
    )
    return [head + ".", "", *table(columns, rows)]


def sweep(found: list[Document]) -> list[str]:
    first = found[0]["rows"][0]["samples_per_second"]
    rows = [
        (
            one["setting"],
            f"{one['samples_per_second']:,.0f}",
            f"± {one['spread']:.1%}",
            f"{one['samples_per_second'] / first:.2f}×",
            f"{one['memory_bytes'] / 2**30:.2f} GiB",
        )
        for one in found[0]["rows"]
        if one["samples_per_second"] is not None
    ]
    how = (
        "`python benchmarks/gpu_tune.py --parts workers,batches`: 50,000 pictures of random bytes in CIFAR-10's "
        "format, two trials of 1.5 s each."
    )
    return [
        f"{found[0]['title']}. {how}",
        "",
        *table(("setting", "samples/s", "spread", "over the first", "memory"), rows),
    ]


def breakdown(found: list[Document]) -> list[str]:
    rows = [
        (
            one["title"],
            f"{one['step_ms_without']:.2f}",
            f"{one['step_ms_with']:.2f}",
            f"{one['cost']:+.2%}",
            f"± {one['spread']:.2%}",
            str(one["pairs"]),
        )
        for one in found[0]["costs"]
    ]
    columns = ("work", "step without, ms", "step with, ms", "cost", "spread", "pairs")
    return [
        "`python benchmarks/gpu_breakdown.py`: the measuring taken out and put back in turn.",
        "",
        *table(columns, rows),
    ]


def precision(found: list[Document]) -> list[str]:
    settings = found[0]["settings"]
    rows = [
        (
            one["precision"],
            f"{one['samples_per_second']:,.0f}",
            f"± {one['spread'] / 2:.1%}",
            f"{one['speed_up']:.2f}×",
            f"{one['memory_bytes'] / 2**30:.2f} GiB",
            f"{one['memory_ratio']:.2f}×",
            f"{one['loss_gap']:+.2%}",
        )
        for one in found[0]["rows"]
        if one["state"] == "measured"
    ]
    columns = ("precision", "samples/s", "spread", "over fp32", "memory", "over fp32", "loss, against fp32")
    command = f"gradus bench precision --model {settings['recipe']} --batch-size {settings['batch']}"
    layout = ", channels_last" if settings["channels_last"] else ""
    return [f"`{command}`, eager{layout}, {settings['steps']} steps of training.", "", *table(columns, rows)]


def replicas(found: list[Document]) -> list[str]:
    settings = found[0]["settings"]
    rows = [
        (
            str(one["replicas"]),
            one["how"],
            f"{one['samples_per_second']:,.0f}",
            f"± {one['spread'] / 2:.1%}",
            f"{one['against_one']:.2f}×",
            f"{one['memory_peak_bytes_each'] / 2**30:.2f} GiB",
        )
        for one in found[0]["rows"]
    ]
    columns = ("processes", "sharing", "samples/s", "spread", "over one", "memory of each")
    head = (
        f"`gradus bench replicas` with {settings['model']}, batch {settings['batch_size']}, {settings['precision']}, "
        "eager: processes that share one GPU, each with a model of its own."
    )
    return [head, "", *table(columns, rows)]


def energy(found: list[Document]) -> list[str]:
    one = found[0]["energy"]
    return [
        "`python benchmarks/gpu_breakdown.py --only energy`: a GPT of 12 layers of width 768, bytes as tokens, with a",
        "context of 1024, batch 32, bf16, compiled, 200 steps, from the driver's counter. Energy of a sample is of the",
        "time of steps; the average power is of the whole run, compiling and all.",
        "",
        "```",
        *one["lines"],
        "```",
    ]


def planted(found: list[Document]) -> list[str]:
    rows = [
        (
            one["case"],
            f"{one['first']['id']}: {one['first']['verdict']}",
            f"`{one['first']['change']}`",
            f"{one['first']['gain_at_most']:.0%}",
            ", ".join(one["mended"]) or "none",
        )
        for one in found[0]["rows"]
    ]
    columns = ("planted", "first finding", "change", "gain at most", "findings once mended")
    return [
        "`python benchmarks/gpu_explain.py`: faults that only a GPU shows, and what `gradus explain` says first.",
        "",
        *table(columns, rows),
    ]


SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[list[Document]], list[str]]], ...] = (
    (
        "ResNet-50 on random data",
        ("resnet50-fp32", "resnet50-tf32", "resnet50-bf16", "resnet50-bf16-channels-last"),
        lab,
    ),
    ("The device", ("device",), device),
    ("What seven methods do", ("tune-knobs",), knobs),
    ("ResNet-18: fp32 against mixed precision", ("tune-resnet18",), precision),
    ("simple-cnn: loader workers", ("tune-workers",), sweep),
    ("simple-cnn: batch", ("tune-batches",), sweep),
    ("Several processes on one GPU", ("replicas",), replicas),
    ("Energy of a sample", ("gpu_breakdown",), energy),
    ("Planted faults", ("gpu_explain",), planted),
    ("What knowing where the time goes costs", ("gpu_breakdown",), breakdown),
)


def page() -> str:
    lines = ["# One H200, measured", ""]
    lines += [
        "Written by `benchmarks/h200_page.py` from results in `benchmarks/measured/bench`. All measured, none quoted"
    ]
    lines += ["unless the column says so. ± is half of the range of repetitions, as a share of their median.", ""]
    for title, names, show in SECTIONS:
        found = [json.loads(path.read_text()) for name in names if (path := RESULTS / f"{name}.json").is_file()]
        if not found:
            continue
        when = datetime.fromtimestamp(found[-1]["time"], timezone.utc)
        version = found[-1].get("torch") or found[-1]["environment"]["torch"]
        lines += [f"## {title}", "", *show(found), "", f"NVIDIA H200, torch {version}, {when:%Y-%m-%d}.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs="*", type=Path, default=[])
    for folder in parser.parse_args().take:
        take(folder)
    PAGE.write_text(page())

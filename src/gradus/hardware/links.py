"""The catalogue of links inside and between nodes: what vendors quote, each number with its source."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from gradus.schema.cluster import LinkNumbers


@dataclass(frozen=True)
class Link:
    """One kind of link, in one direction: of a GPU inside a node, of a port between nodes.

    `latency_us` is what a hop adds to a message, or None where nobody is known to quote it. `sources` says for both
    where they come from. GPUs of a node with fewer than `meshed_below` have no switch: each pair of them has its own
    part of their links.
    """

    name: str
    gb_per_second: float
    latency_us: float | None
    sources: Mapping[str, str]
    also_called: tuple[str, ...] = ()
    meshed_below: int = 0


@functools.cache
def all_links() -> tuple[Link, ...]:
    entries = yaml.safe_load(resources.files("gradus.hardware").joinpath("links.yaml").read_text())
    return tuple(_link(entry) for entry in entries)


def find_link(name: str) -> Link | None:
    """The link with this name or another spelling of it."""
    return _by_name().get(_comparable(name))


def link_of(given: str | LinkNumbers | None) -> Link | None:
    """The link that a cluster names or gives by numbers; None where it says nothing, or no known name."""
    if isinstance(given, LinkNumbers):
        sources = {"bandwidth": "the cluster file", "latency": "the cluster file"}
        return Link(given.name, given.gb_per_second, given.latency_us, sources)
    return None if given is None else find_link(given)


@functools.cache
def _by_name() -> Mapping[str, Link]:
    return {_comparable(name): link for link in all_links() for name in (link.name, *link.also_called)}


def _comparable(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "", name.lower())


def _link(entry: Mapping[str, Any]) -> Link:
    latency = entry.get("latency")
    sources = {"bandwidth": entry["bandwidth"]["source"]}
    if latency is not None:
        sources["latency"] = latency["source"]
    return Link(
        name=entry["name"],
        gb_per_second=float(entry["bandwidth"]["gb_per_second"]),
        latency_us=None if latency is None else float(latency["us"]),
        sources=sources,
        also_called=tuple(entry.get("also_called", ())),
        meshed_below=entry.get("meshed_below", 0),
    )

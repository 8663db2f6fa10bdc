"""Page: a whole HTML file that opens anywhere, offline: light and dark, on a phone and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

TEMPLATE = "page.html.j2"
# Nothing from anywhere: what the page needs is in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A part of a page: where links lead to, its heading, and its HTML."""

    id: str
    heading: str
    html: str


@dataclass(frozen=True)
class Fact:
    """A number at the head of a page, with what it is and where it comes from."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Head:
    """What stands above all sections."""

    title: str
    subtitle: str = ""
    chip: str = ""  # a word: finished, failed, running, ...
    chip_kind: str = ""  # good, warn, bad
    facts: tuple[Fact, ...] = field(default=())


def page(
    title: str | Head,
    sections: Sequence[Section | tuple[str, str]],
    subtitle: str = "",
    *,
    script: str = "",
    policy: str | None = _POLICY,
) -> str:
    """The file. A section may be just (heading, html). A page that goes on living brings a `script` and a `policy`."""
    head = title if isinstance(title, Head) else Head(title, subtitle)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("gradus.record").joinpath(TEMPLATE).read_text("utf-8"))
    parts = [one if isinstance(one, Section) else Section(_id(one[0]), *one) for one in sections]
    return template.render(
        title=head.title,
        head=Markup(head_html(head)),
        sections=[(part.id, part.heading, Markup(part.html)) for part in parts],
        script=Markup(script),
        policy=policy,
    )


def head_html(head: Head) -> str:
    """What is in the page's `<header>`."""
    chip = f' <span class="chip {escape(head.chip_kind)}">{escape(head.chip)}</span>' if head.chip else ""
    under = f'<p class="sub">{escape(head.subtitle)}</p>\n' if head.subtitle else ""
    return f"<h1>{escape(head.title)}{chip}</h1>\n{under}{facts_html(head.facts)}"


def facts_html(facts: Iterable[Fact]) -> str:
    """Names with values, as many in a row as there is room."""
    items = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}"
        + (f"<small>{escape(fact.note)}</small>" if fact.note else "")
        + "</dd></div>"
        for fact in facts
    )
    return f'<dl class="facts">{items}</dl>\n' if items else ""


def table_html(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    text_columns: int = 1,
    numbers: int | None = None,
    caption: str = "",
) -> str:
    """A table that scrolls by itself where it is too wide.

    The first `text_columns` are words, the others numbers; with `numbers`, only so many, and words again after them.
    """
    last = len(header) if numbers is None else text_columns + numbers
    style = ["" if at < text_columns or at >= last else ' class="number"' for at in range(len(header))]
    heads = "".join(f'<th scope="col"{style[at]}>{escape(name)}</th>' for at, name in enumerate(header))
    lines = "".join(
        "<tr>" + "".join(f"<td{style[at]}>{_cell(value)}</td>" for at, value in enumerate(row)) + "</tr>\n"
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table>{title}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{lines}</tbody></table></div>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f"<p{style}>{escape(text)}</p>\n"


def missing(text: str) -> str:
    """What stands where something is not there: what, and why."""
    return paragraph(text, "missing")


def folded(summary: str, text: str) -> str:
    """A file or a long text that opens on a click, and on paper is left out."""
    return f"<details><summary>{escape(summary)}</summary><pre><code>{escape(text)}</code></pre></details>\n"


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>\n"


def _cell(value: object) -> str:
    if value is None or value == "":
        return '<span class="none">–</span>'
    return str(value) if isinstance(value, Markup) else escape(str(value))


def _id(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"

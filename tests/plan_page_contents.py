"""What is on a page of ranked plans."""

from __future__ import annotations

from html.parser import HTMLParser


class Contents(HTMLParser):
    """Rows of the ranked plans, the visible sections, the bars, and everything that a page could load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.shown: list[str] = []
        self.charts: dict[str, list[str]] = {}
        self.loads: list[str] = []
        self.text = ""
        self._in_plans = self._in_cell = self._in_script = False
        self._section = self._chart = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loads += [f"{tag} {key}={given[key]}" for key in ("src", "href", "action", "data") if key in given]
        self._in_script = tag in ("script", "style")
        if tag == "table":
            self._in_plans = given.get("id") == "plans"
            self._chart = f"{self._section} {given.get('data-chart', '')}".strip()
        if tag == "section":
            self._section = given["id"]
            if "hidden" not in given:
                self.shown.append(given["id"])
        if tag == "tr" and self._in_plans:
            self.rows.append([])
        if tag in ("td", "th") and self._in_plans:
            self.rows[-1].append("")
            self._in_cell = True
        if tag == "svg":
            self.charts.setdefault(self._chart, []).append(given["aria-label"])

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False
        self._in_script = False

    def handle_data(self, data):
        if not self._in_script:
            self.text += data
        if self._in_plans and self._in_cell:
            self.rows[-1][-1] += data.strip()

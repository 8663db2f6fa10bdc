"""Child: traces a model in a process of its own, for one that must not load torch.

It reads a recipe and requests as JSON on stdin, and writes the profiles, or the error, as JSON on stdout. A user's
code may print what it likes: that goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gradus.planner.profile.request import ProfileRequest, traced_here
from gradus.planner.profile.stored import to_text
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Origin, Recipe


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The profiles that were asked for, as texts; or the error that came first, whole."""
    recipe = Recipe.from_document(question["recipe"])
    recipe._origin = Origin(question["file"], tuple(question["overrides"]))
    try:
        requests = [ProfileRequest.from_document(document) for document in question["requests"]]
        return {"profiles": [to_text(traced_here(recipe, request)) for request in requests]}
    except GradusError as error:
        return {"error": {"bad_input": isinstance(error, InputError), **error.document()}}


def main() -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(stdout, "w") as out:
        json.dump(answer(json.load(sys.stdin)), out, default=str)


if __name__ == "__main__":
    main()

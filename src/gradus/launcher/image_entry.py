"""The second program in a container, with the image's own Python: puts beside its packages what gradus needs besides.

It stands alone: of gradus and its dependencies nothing can be imported yet. Copies of them lie beside this file, each
in a folder of its own, and those go into PYTHONPATH that the image lacks or has in a version that will not do. torch is
never among them: the image is chosen for its torch, and one that is too old is refused. Exit code 93: it would be
refused again.

`image_entry.py --check` says what would be done; anything else is given to the image's Python as its arguments. Of the
language it uses no more than Python 3.7 had, so that an older image gets an answer too.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

REFUSED = 93


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.6.0a0+df5bbc09d1.nv24.11 is (2, 6, 0)."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version is one of `>=2.7,<3`, by its numbers: what comes after them does not count."""
    return all(_satisfies(numbers_of(version), part.strip()) for part in specifier.split(",") if part.strip())


def _satisfies(found: tuple[int, ...], part: str) -> bool:
    operator = part[: len(part) - len(part.lstrip("=<>!~"))]
    text = part[len(operator) :].strip()
    wanted = numbers_of(text)
    length = max(len(found), len(wanted))
    left, right = found + (0,) * (length - len(found)), wanted + (0,) * (length - len(wanted))
    if operator == "~=":
        return left >= right and found[: len(wanted) - 1] == wanted[:-1]
    same = found[: len(wanted)] == wanted if text.endswith(".*") else left == right
    tests = {"!=": not same, "<=": left <= right, ">=": left >= right, "<": left < right, ">": left > right}
    return tests.get(operator, same)


def fits(tags: list[str], python: tuple[int, int]) -> bool:
    """Whether a package with one of these tags (cp311-cp311-…, cp310-abi3-…, py3-none-any) runs with this Python."""
    for tag in tags:
        made_for, abi = tag.split("-")[:2]
        oldest = re.match(r"cp3(\d+)$", made_for)
        if abi in ("none", f"cp{python[0]}{python[1]}") or (abi == "abi3" and oldest and int(oldest[1]) <= python[1]):
            return True
    return False


def chosen(
    packages: dict[str, Any], version_inside: Callable[[str], str | None], python: tuple[int, int]
) -> tuple[list[str], list[str]]:
    """The packages to take from outside, and what stands against it."""
    taken: list[str] = []
    problems: list[str] = []
    wanted = [("gradus", "", "")]
    while wanted:
        name, specifier, needed_by = wanted.pop(0)
        inside = None if name == "gradus" else version_inside(name)
        if name in taken or (inside is not None and satisfies(inside, specifier)):
            continue
        package = packages.get(name)
        has = f"has {name} {inside}" if inside else f"has no {name}"
        if package is None:
            problems.append(f"the image {has}, and {needed_by} needs {name} {specifier}".rstrip())
        elif not fits(package["tags"], python):
            problems.append(
                f"the image {has}, and the {package['version']} outside is built for another Python "
                f"({package['tags'][0]}; the image has {python[0]}.{python[1]})"
            )
        else:
            taken.append(name)
            wanted += [(required, of_it, name) for required, of_it in package["requires"]]
    return taken, problems


def version_of(name: str) -> str | None:
    """The version of a package that is installed here, in the image."""
    from importlib.metadata import PackageNotFoundError, version  # from Python 3.8 on

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def hint_for(problems: list[str]) -> str:
    if any("torch" in problem for problem in problems):
        return "take an image with a newer torch, or container.python: environment (the Python and torch outside)"
    return "install it in the image, or submit from an environment with the image's version of Python"


def main(arguments: list[str]) -> int:  # noqa: RET503  (execv does not return)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "software.json")) as file:
        manifest = json.load(file)
    python = sys.version_info[:2]
    version = f"{python[0]}.{python[1]}"
    taken: list[str] = []
    problems = [f"the image has Python {version}, and gradus needs {manifest['python']}"]
    if satisfies(version, manifest["python"]):
        taken, problems = chosen(manifest["packages"], version_of, python)
    if problems:
        for line in (*problems, f"hint: {hint_for(problems)}"):
            print(f"gradus: {line}", file=sys.stderr)
        return REFUSED
    if arguments == ["--check"]:
        print(json.dumps({"python": version, "torch": version_of("torch"), "taken": taken}))
        return 0
    folders = [os.path.join(here, "packages", name) for name in taken]
    before = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.exists(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *before])
    os.environ["PYTHONNOUSERSITE"] = "1"  # packages in a home folder that is mounted after all are not the image's
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Starting: a run that died of what it needs before its first step: modules to import, a process group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gradus.diagnosis.demise import Demise
from gradus.diagnosis.finding import Finding

_NO_GROUP = re.compile(
    r"Default process group has not been initialized|process group (?:is|was) not "
    r"initialized|init_process_group (?:must|has to|should) be called",
    re.IGNORECASE,
)
_NO_BACKEND = re.compile(r"Distributed package doesn't have (\w+) built in", re.IGNORECASE)
_NO_VARIABLE = re.compile(
    r"environment variable (\w+) expected, but not set|KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
)
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'|[Nn]o module named '([^']+)'")
_IMPORT = re.compile(r"^(ImportError: .*)$", re.MULTILINE)
_LIBRARY = re.compile(r"(\S+\.so\S*): cannot open shared object file|(\S+\.so\S*): undefined symbol")
_NO_NAME = re.compile(r"cannot import name '(?P<name>[^']+)' from '[^']+' \((?P<file>/[^)]+\.py)\)")
_PACKAGED = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/")
# Modules whose packages have another name.
_PACKAGES = {
    "PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "skimage": "scikit-image",
    "yaml": "PyYAML", "bs4": "beautifulsoup4", "pynvml": "nvidia-ml-py", "google.protobuf": "protobuf",
}  # fmt: skip


def no_process_group(demise: Demise) -> Finding | None:
    missing = _NO_VARIABLE.search(demise.text)
    if missing is not None:
        name = missing[1] or missing[2]
        verdict = f"the script needs {name}, which only a launcher sets"
        evidence: dict[str, Any] = {**demise.facts, "variable": name}
        ranks = demise.evidence.ranks
        script = demise.evidence.script.text if demise.evidence.script else "script.py"
        change = f"gradus train --nproc {ranks} -- {script} (or torchrun --nproc-per-node {ranks} {script})"
        return Finding("no-process-group", verdict, evidence, change, None, "high", "fatal")
    place = demise.place
    at = f", at {place}" if place else ""
    backend = _NO_BACKEND.search(demise.text)
    if backend is not None:
        verdict = f"this torch has no {backend[1].upper()}{at}"
        change = 'torch.distributed.init_process_group("gloo") there, which works on a CPU; or a torch with CUDA'
        return Finding("no-process-group", verdict, demise.facts, change, None, "high", "fatal")
    if not _NO_GROUP.search(demise.text):
        return None
    call = f'torch.distributed.init_process_group("{"nccl" if demise.evidence.has_gpu else "gloo"}")'
    if demise.evidence.recipe is not None and demise.evidence.script is None:
        verdict = f"code of the recipe asks other ranks, but a run of one rank has no process group{at}"
        change = "ask torch.distributed.is_initialized() first, or use gradus train --nproc 2"
    else:
        verdict = f"the process group is used before there is one{at}"
        before = f"before line {demise.facts['line']} of {demise.facts['file']}" if "line" in demise.facts else "first"
        change = f"{call} {before}; the variables that it reads are there: {demise.start}"
    return Finding("no-process-group", verdict, demise.facts, change, None, "high", "fatal")


def import_error(demise: Demise) -> Finding | None:
    """Which module, and whether it is missing everywhere or on one node."""
    text = demise.said if _import_failed(demise.said) else demise.text
    module = _NO_MODULE.search(text)
    other = _IMPORT.search(text) or _LIBRARY.search(text)
    if module is None and (other is None or "ImportError" not in text):
        return None
    if module is not None and "ModuleNotFoundError" not in text and demise.error.get("kind") != "bad-input":
        return None
    name = (module[1] or module[2]) if module is not None else None
    with_it, without = _ranks(demise)
    nodes = sorted({demise.nodes_of_ranks[rank] for rank in without if rank in demise.nodes_of_ranks})
    all_nodes = sorted(set(demise.nodes_of_ranks.values()))
    evidence: dict[str, Any] = {
        **demise.facts,
        "module": name,
        "ranks": without,
        "nodes": nodes,
        "ranks_with_it": with_it,
    }
    what = f"the module {name!r} is missing" if name is not None else f"an import failed ({other[0] if other else ''})"
    only_there = bool(nodes) and len(nodes) < len(all_nodes)
    if only_there:
        where = f"on {', '.join(nodes)}, and not on {', '.join(sorted(set(all_nodes) - set(nodes)))}"
    elif with_it and without:
        where = f"for rank {', '.join(map(str, without))}, and not for rank {', '.join(map(str, with_it))}"
    else:
        where = "for all ranks" if len(without) > 1 else f"for {demise.who}"
    at = f", at {demise.place}" if demise.place else ""
    change = _of_own_file(demise, text) or _installed(demise, name, nodes if only_there else [], bool(with_it))
    return Finding("import-error", f"{what} {where}{at}", evidence, change, None, "high", "fatal")


def _import_failed(text: str) -> bool:
    return "ModuleNotFoundError" in text or "ImportError" in text


def _ranks(demise: Demise) -> tuple[list[int], list[int]]:
    """Ranks that said something other, and ranks that missed the module."""
    failed = sorted(rank for rank, lines in demise.lines_of_ranks.items() if _import_failed("\n".join(lines)))
    first = demise.error.get("rank")
    if not failed and first is not None:
        failed = [first]
    everyone = set(range(demise.evidence.ranks)) | set(demise.lines_of_ranks)
    return sorted(everyone - set(failed)), failed


def _of_own_file(demise: Demise, text: str) -> str | None:
    """Where a name is missing in a module of the user's own, which no package manager can mend."""
    found = _NO_NAME.search(text)
    if found is None or _PACKAGED.search(found["file"]):
        return None
    at = f"or the import at {demise.place}" if demise.place else "or what imports it"
    return f"mend {found['file']}, which has no {found['name']!r}, {at}; then {demise.resume}"


def _installed(demise: Demise, name: str | None, nodes: list[str], some_have_it: bool) -> str:
    if name is None:
        return (
            "make the versions of these packages fit: `python -m pip check`, run where the ranks run, says which do not"
        )
    file = _beside_the_script(demise, name)
    if file is not None:
        return f"PYTHONPATH={file} in the environment of the ranks: the module is a file there"
    package = _PACKAGES.get(name, name.partition(".")[0])
    if nodes:
        shared = (
            "or an environment that all nodes see: in the cluster file, environment: {venv: FOLDER} or {pack: true}"
        )
        return f"python -m pip install {package} on {', '.join(nodes)}; {shared}"
    if some_have_it:
        return f"python -m pip install {package}, and import it on all ranks alike"
    return f"python -m pip install {package} into the environment of the ranks, then {demise.resume}"


def _beside_the_script(demise: Demise, name: str) -> Path | None:
    """The folder, beside the script or one above, that has the module as a file."""
    script = demise.evidence.script
    if script is None:
        return None
    top = name.partition(".")[0]
    here = (script.directory / script.target).parent
    for folder in (here, here.parent, script.directory, here / "src", script.directory / "src"):
        if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
            return folder
    return None

"""Out of memory: of a GPU or of the host, what held it, and what would fit, in the order of what it costs."""

from __future__ import annotations

import re
from typing import Any

from gradus.diagnosis.demise import Demise
from gradus.diagnosis.finding import Confidence, Finding
from gradus.diagnosis.user_source.files import user_files
from gradus.diagnosis.user_source.loaders import training_loader
from gradus.planner.choice.typed import options
from gradus.record.device_log import read_device_samples
from gradus.record.format import bytes_text

_GPU = re.compile(
    r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC"
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|can't allocate memory|not enough memory: you tried|MemoryError"
    r"|std::bad_alloc|Cannot allocate memory|\[Errno 12\]"
)
# Not one that crashed or left: only whoever has no memory left kills it, or takes away what it writes to.
_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: (?:Killed|Bus error)[^\n]*")
_SHARED = re.compile(
    r"insufficient shared memory|Bus error|unable to (?:open|mmap|allocate) shared memory", re.IGNORECASE
)
_KERNEL = re.compile(
    r"oom[-_ ]?kill|Out of memory: Killed process|OOM Killed|memory cgroup out of memory", re.IGNORECASE
)
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Parts of torch's error, in the wordings of 1.x, of 2.1 ("capacty") and of newer ones, and what they say in bytes.
_FACTS = {
    "asked_bytes": re.compile(rf"[Tt]ried to allocate {_SIZE}"),
    "limit_bytes": re.compile(rf"total capac?i?ty of {_SIZE}|{_SIZE} total capacity"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free|; {_SIZE} free"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "others_bytes": re.compile(rf"Process \d+ has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated"),
    "unused_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_HOST_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
# A host so full shortly before a rank was killed: then it was the kernel that did it, for lack of memory.
_FULL = 0.9


def out_of_memory(demise: Demise) -> Finding | None:
    """Of a GPU, where torch says so; of the host, where torch, Python or the kernel does."""
    if demise.error.get("kind") == "out-of-memory":
        return _explained(demise)
    if _GPU.search(demise.text):
        return _of_a_script(demise)
    if _HOST.search(demise.text):
        return _of_the_host(demise)
    worker = _WORKER.search(demise.text)
    if worker is not None or (_SHARED.search(demise.text) and "DataLoader" in demise.text):
        return _of_a_worker(demise, worker[0] if worker is not None else "")
    return _killed_by_the_kernel(demise)


def _explained(demise: Demise) -> Finding:
    """A run of ours: the rank has said what it held, and asked the planner what would fit."""
    error = demise.error
    memory = {key: value for key, value in (error.get("memory") or {}).items() if value is not None}
    predicted = memory.pop("predicted", None)
    held = {f"{key.removesuffix('_bytes')}_bytes": value for key, value in memory.items()}
    fixes = [_fix(change) for change in error.get("changes") or []]
    evidence: dict[str, Any] = {**demise.facts, "binds": error.get("binds"), **held, "fixes": fixes}
    if predicted:
        evidence["predicted_bytes"] = predicted
    what = f"{demise.first_line}; what binds: {error.get('binds') or 'not known'}"
    change = "; or ".join(f"{options(fix['set'])} ({_needs(fix)})" for fix in fixes) or str(error.get("hint") or "")
    missing = () if "used_bytes" in memory else ("how much was in use: torch counts only the memory of GPUs",)
    return Finding("out-of-memory", what, evidence, change, None, "high", "fatal", missing)


def _fix(change: dict[str, Any]) -> dict[str, Any]:
    state, activations = change.get("state_bytes"), change.get("activation_bytes_at_least") or 0
    total = None if state is None else int(state) + int(activations)
    return {
        "set": change.get("set") or {},
        "ranks": change.get("ranks"),
        "predicted_bytes": total,
        "activations_at_least_bytes": int(activations),
    }


def _needs(fix: dict[str, Any]) -> str:
    ranks = f" on each of {fix['ranks']} ranks" if (fix["ranks"] or 1) > 1 else ""
    if fix["predicted_bytes"] is None:
        return f"not predicted{ranks}"
    known = "" if fix["activations_at_least_bytes"] else ", and its activations"
    return f"predicted: {bytes_text(fix['predicted_bytes'])}{known}{ranks}"


def _of_a_script(demise: Demise) -> Finding:
    """Of code that is not ours there is only what torch says, and that is a good deal."""
    found = {name: size for name, words in _FACTS.items() if (size := _bytes(words, demise.text)) is not None}
    asked, unused, others = (found.get(name, 0) for name in ("asked_bytes", "unused_bytes", "others_bytes"))
    evidence: dict[str, Any] = {**demise.facts, **found}
    loader = training_loader(user_files(demise.evidence))
    place = loader.batch_size_text if loader is not None else None
    if place is not None:
        evidence["batch_size"] = place
    if others > found.get("process_bytes", 0):
        what, change = (
            f"another process holds {bytes_text(others)} of the GPU",
            "end that process (nvidia-smi names it), or ask for a GPU of your own",
        )
    elif asked and unused > 2 * asked:
        what = f"torch holds {bytes_text(unused)} of it in pieces that nothing fits into (fragmentation)"
        change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of the ranks"
    else:
        smaller = f"a smaller batch for each rank: {place}" if place is not None else "a smaller batch for each rank"
        what = "the model with its activations does not fit"
        change = (
            f"{smaller}, with gradient accumulation over as many more steps; or torch.utils.checkpoint around its "
            "blocks; or autocast in bfloat16; or FullyShardedDataParallel over several GPUs. gradus plan predicts the "
            "GiB of each for a recipe"
        )
    limit = f" of {bytes_text(found['limit_bytes'])}" if "limit_bytes" in found else ""
    said = f" (asked for {bytes_text(asked)} more)" if asked else ""
    verdict = f"{demise.who} ran out of GPU memory{limit}{said}: {what}"
    return Finding(
        *("out-of-memory", verdict, evidence, change, None, "high", "fatal"),
        ("what each of these would need: gradus can predict it only for a recipe",),
    )


def _of_the_host(demise: Demise) -> Finding:
    asked = _HOST_ASKED.search(demise.text)
    evidence = {**demise.facts, **_host_memory(demise)}
    if asked is not None:
        evidence["asked_bytes"] = int(asked[1])
        if int(asked[1]) > evidence.get("host_memory_total_bytes", float("inf")):
            evidence["more_than_there_is"] = True
    more = f", when it asked for {bytes_text(int(asked[1]))} more" if asked else ""
    where = f", at {demise.place}" if demise.place else ""
    verdict = f"{demise.who} ran out of host memory{more}{where}"
    change = _less_host_memory(demise)
    if evidence.get("more_than_there_is"):
        change = f"ask for less{where}: the whole host has {bytes_text(evidence['host_memory_total_bytes'])}"
    return Finding("out-of-memory", verdict, evidence, change, None, "high", "fatal")


def _of_a_worker(demise: Demise, said: str) -> Finding:
    shared = bool(_SHARED.search(demise.text))
    what = "shared memory (/dev/shm) is too small for the batches of its workers" if shared else "memory ran out"
    verdict = f"a loader worker of {demise.who} was killed, most likely because {what}: {said or demise.first_line}"
    change = "fewer or no workers: " + _workers(demise)
    if shared:
        change += "; or a larger /dev/shm (docker run --shm-size=16g)"
    evidence = {**demise.facts, **_host_memory(demise)}
    return Finding("out-of-memory", verdict, evidence, change, None, "medium", "fatal")


def _killed_by_the_kernel(demise: Demise) -> Finding | None:
    if demise.error.get("signal") != "SIGKILL" and "killed by SIGKILL" not in demise.message:
        return None
    memory = _host_memory(demise)
    share = memory.get("host_memory_share")
    told = _KERNEL.search(demise.log)
    if told is None and (share is None or share < _FULL):
        return None
    how = f"the host's memory was {share:.0%} full" if share is not None else f"the log says: {told[0] if told else ''}"
    verdict = f"{demise.who} was killed by the kernel because host memory ran out: {how}"
    evidence = {**demise.facts, **memory}
    confidence: Confidence = "high" if told else "medium"
    return Finding("out-of-memory", verdict, evidence, _less_host_memory(demise), None, confidence, "fatal")


def _host_memory(demise: Demise) -> dict[str, Any]:
    """As it was last seen before the end; nothing where it was not sampled."""
    samples = read_device_samples(demise.run, demise.evidence.attempt)
    node = demise.error.get("node")
    mine = [one for one in samples if one.node == node] or samples
    if not mine:
        return {}
    host = mine[-1].host
    used, total = host.memory_used_bytes, host.memory_total_bytes
    if not used or not total:
        return {}
    return {"host_memory_used_bytes": used, "host_memory_total_bytes": total, "host_memory_share": used / total}


def _less_host_memory(demise: Demise) -> str:
    steps = [f"fewer loader workers: {_workers(demise)}"]
    plan = demise.evidence.plan
    if plan is not None and plan.offload == "cpu":
        steps.insert(0, "--set plan.offload=none, where the GPUs have room")
    if plan is not None:
        smaller = max(1, plan.micro_batch // 2)
        if smaller < plan.micro_batch:
            steps.append(f"--set plan.micro_batch={smaller} --set plan.accumulate={plan.accumulate * 2}")
        steps.append("--set checkpoint.background=false: no second copy of the model while it is saved")
    else:
        steps.append("a smaller batch for each rank")
    if demise.standing is not None:
        steps.append('more memory for the job: --sbatch "--mem=0" gives it all of each node')
    return "; or ".join(steps)


def _workers(demise: Demise) -> str:
    plan = demise.evidence.plan
    if plan is None:
        return "num_workers of the script's DataLoader"
    now = plan.workers if isinstance(plan.workers, int) else None
    return f"--set plan.workers={now // 2 if now else 0}"


def _bytes(words: re.Pattern[str], text: str) -> int | None:
    match = words.search(text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * _UNITS[unit])

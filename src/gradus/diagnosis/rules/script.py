"""Script: mistakes in a loop of the user's own that make what it learns worse, told by its text alone."""

from __future__ import annotations

from collections.abc import Iterator

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Confidence, Finding
from gradus.diagnosis.user_source.files import user_files
from gradus.diagnosis.user_source.mistakes import (
    Mistake,
    gradients_that_add_up,
    order_that_never_changes,
    rank_within_the_node,
)


def mistakes(evidence: Evidence) -> Iterator[Finding]:
    if evidence.script is None or evidence.recipe is not None:
        return  # a loop with gradus.Run in it is not torch's own
    for event in evidence.last_events:
        if event.get("event") == "finding" and "no rank ever connected" in str(event.get("message")):
            yield _never_met(evidence, str(event["message"]))
    files = user_files(evidence)
    if (found := gradients_that_add_up(files)) is not None:
        yield _told(
            found,
            "the gradients of all steps add up: nothing sets them back",
            f"optimizer.zero_grad() before the backward pass, or after line {found.line}",
            "medium",
        )
    nodes = len(list(evidence.attempt_path.glob("logs/*.log"))) if evidence.attempt_path is not None else 1
    if nodes > 1 and (found := rank_within_the_node(files)) is not None:
        yield _told(
            found,
            f"on {nodes} nodes the sampler is given the rank within the node: part of the data is never seen",
            "rank=torch.distributed.get_rank() in that line, or leave it out",
            "high",
        )
    if evidence.ranks > 1 and (found := order_that_never_changes(files)) is not None:
        yield _told(
            found,
            "all epochs have the same order of samples: the sampler is never told which epoch it is",
            "sampler.set_epoch(epoch) at the beginning of each epoch",
            "low",
        )


def _never_met(evidence: Evidence, message: str) -> Finding:
    backend = "nccl" if evidence.has_gpu else "gloo"
    change = f'torch.distributed.init_process_group("{backend}") and DistributedDataParallel(model); or --nproc 1'
    return Finding("no-process-group", message, {"ranks": evidence.ranks}, change, None, "medium", "quality")


def _told(found: Mistake, what: str, change: str, confidence: Confidence) -> Finding:
    place = f"{found.file}:{found.line}"
    evidence = {"file": found.file, "line": found.line, "code": found.code}
    return Finding(found.id, f"{what} ({place} `{found.code}`)", evidence, change, None, confidence, "quality")


RULES = (mistakes,)

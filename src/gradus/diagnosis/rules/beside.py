"""Beside: time of a step that is neither data nor computing: what a loop of one's own does between steps, and hooks."""

from __future__ import annotations

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding

LEAST_SHARE = 0.2  # of a step, without saving and evaluating
# Between steps, numbers of the last one are read and logged: in steps of toy models that is a large share.
LEAST_SECONDS = 0.01
_SHORTER = "do it at every 50th step, or beside training, in a thread or a process"


def work_beside_steps(evidence: Evidence) -> Finding | None:
    # On every rank: where only one is held up, the others wait for it, and it is a straggler.
    spent, step = min(evidence.by_rank("other").values(), default=0.0), evidence.judged_step_seconds
    hooks = [hook.use for hook in evidence.recipe.hooks] if evidence.recipe is not None else []
    if not evidence.is_own_loop and not hooks:
        return None  # there is no code of the user's between steps
    if not step or spent < max(LEAST_SECONDS, LEAST_SHARE * (evidence.training_seconds or step)):
        return None
    trace = f"`{evidence.profiling('steps=5,stacks')}` shows its lines"
    if evidence.is_own_loop:
        where = "in the loop's own code, between run.step and the next batch"
        change = (
            f"what follows run.step in the loop: {_SHORTER}; a validation by hand becomes run.evaluate, at every "
            f"evaluate.every steps; {trace}"
        )
    else:
        where = f"most likely in hooks ({', '.join(hooks)})"
        change = f"the hooks' on_step: {_SHORTER}; {trace}"
    facts = {
        "other_seconds": spent,
        "step_seconds": step,
        "share": spent / step,
        "hooks": hooks or None,
        "steps": evidence.steps_measured,
    }
    return Finding(
        "work-beside-steps",
        f"{spent / step:.0%} of a step is neither data, forward, backward nor optimizer: it passes {where}",
        facts,
        change,
        spent / step,
        evidence.confidence,
        not_measured=("which lines",),
    )


RULES = (work_beside_steps,)

"""Prediction: what a plan would need and how fast it would be: memory, time and the whole run, put together. No torch.

Recipe ── traced ──▶ profile ── plan, cluster ──▶ memory of a rank, seconds of a step ──▶ the whole run
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradus.hardware.cluster import gpu_of
from gradus.parallel.split_rules import more_than_its_blocks
from gradus.parallel.support import check_supported
from gradus.planner.budget import Length, budget, budget_basis, dataset_length, length_of, writing_seconds
from gradus.planner.calibration import calibration_basis, corrected_memory, step_at_achieved_rate
from gradus.planner.choice.candidates import waits_on_host
from gradus.planner.choice.levers import NOTICED, chunks_of
from gradus.planner.defaults import case_of, check_ranks, default_plan, ranks_on_a_node, surroundings
from gradus.planner.memory.device_memory import NO_GPU, device_memory
from gradus.planner.memory.host_memory import HostFacts
from gradus.planner.memory.model_state import ModelSize
from gradus.planner.memory.rank_memory import (
    MemoryFacts,
    RankMemory,
    least_bytes,
    limit_bytes,
    memory_facts,
    predicted_memory,
    under_a_cap,
    verdict,
)
from gradus.planner.memory.saved_state import checkpoint_bytes
from gradus.planner.model_facts import facts_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.profile.request import NARROW, ProfileRequest, capability_of, profiles_for, request_for
from gradus.planner.resident_data import resident_bytes
from gradus.planner.resolve import resolved
from gradus.planner.speed.device import Device, device_of
from gradus.planner.speed.host_copy import host_copy
from gradus.planner.speed.network import fabric_of
from gradus.planner.speed.step_time import GRAPHS_SECONDS, StepFacts, launching_seconds, predicted_step
from gradus.planner.speed.throughput import hardware_flops, model_flops, throughput
from gradus.planner.step_error import step_error
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.loading import validated
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import BudgetPrediction, MemoryPrediction, Prediction, StepPrediction, Verdict
from gradus.schema.recipe import Recipe

GIB = 2**30
# Of a GPU with n GB by its vendor, a process can use nearly n GiB: torch reports 23.64 of 24 on an RTX 4090
# (ali-vilab/VGen issue 104), 31.75 of 32 (hiyouga/LlamaFactory issue 182), 23.53 of 24 on an A30
# (google/RB-Modulation issue 5). The least of these shares, rounded down.
USABLE = 0.98


def predict(recipe: Recipe | str | Path, cluster: Cluster | str | Path, plan: Plan | Mapping[str, Any]) -> Prediction:
    """What this plan of the recipe would need and how fast it would be on the cluster. Nothing is started.

    A plan may be given in parts, as a recipe's `plan:` block: what it leaves out gets the plain defaults.
    """
    recipe = resolved(recipe if isinstance(recipe, Recipe) else Recipe.load(recipe))
    site = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    if not isinstance(plan, Plan):
        fixed = validated(Plan, {**recipe.plan.model_dump(exclude_unset=True), **plan}, "plan")
        plan = default_plan(recipe.model_copy(update={"plan": fixed}), site).plan
    with recipe.blamed():
        plan.check(recipe.batch, plan.mesh.world_size)
        # What a run would refuse has no prediction either.
        check_ranks(recipe.model_copy(update={"plan": plan}), site, plan.mesh.world_size, None)
        check_supported(case_of(recipe, site, plan))
    predictor = Predictor(recipe, site)
    predictor.check_recomputed_blocks(plan)
    predictor.check_weights(plan)
    return predictor.prediction(plan)


def predicted(profile: ModelProfile, recipe: Recipe, cluster: Cluster, plan: Plan) -> Prediction:
    """The same from a profile that is there already, traced as the plan computes."""
    return Predictor(recipe, cluster, profile).prediction(plan)


def device_bytes(cluster: Cluster) -> int | None:
    """Memory of one GPU of a cluster, as far as processes can use it; None where it is not known."""
    if isinstance(cluster.gpu, GpuNumbers) and cluster.gpus_per_node:
        return round(cluster.gpu.memory_gib * GIB)
    gpu = gpu_of(cluster)
    return round((gpu.usable_gib or gpu.memory_gb * USABLE) * GIB) if gpu is not None else None


class Predictor:
    """What there is to say about plans of one recipe on one cluster; what they have in common is found out once."""

    def __init__(self, recipe: Recipe, cluster: Cluster, profile: ModelProfile | None = None) -> None:
        self.recipe = recipe
        self.cluster = cluster
        self.device: Device | None = device_of(cluster) if cluster.gpus_per_node else None
        self._profile = profile
        self._step_facts = StepFacts.of(recipe)
        self._profiles: dict[ProfileRequest, ModelProfile] = {}
        self._facts: dict[tuple[int, bool, bool], MemoryFacts] = {}
        self._memories: dict[str, RankMemory] = {}
        self._seconds: dict[str, StepPrediction | None] = {}
        # Whether the model was traced with weights in 16 bits, and how it failed with them, and only with them; `trace`
        # finds out.
        self.takes_narrow, self.narrow_failure = False, ""

    @functools.cached_property
    def limit_bytes(self) -> int | None:
        """What a rank may use, of its GPU or, without GPUs, of its node."""
        return self._limit_bytes(self.recipe.plan)

    def trace(self) -> ModelProfile:
        """The profile that most plans are predicted from. What others need is traced with it: loading torch is slow."""
        if self._profile is not None:
            return self._profile
        whole = self._request(Plan(mesh=Mesh(replicate=2)))
        if whole.precision not in NARROW:
            return profiles_for(self.recipe, [whole])[0]
        alone = self._request(Plan())
        if self.cluster.nodes * self.cluster.gpus_per_node * self.recipe.plan.ranks_per_gpu > 1:
            sharded = replace(whole, narrow_parameters=True, channels_last=self.recipe.plan.channels_last)
            profile, of_shards, narrow = profiles_for(self.recipe, [whole, sharded, alone])
            self.narrow_failure = of_shards.narrow_failure
        else:
            profile = narrow = profiles_for(self.recipe, [alone, *self._chunked(alone)])[0]
        self.narrow_failure = narrow.narrow_failure or self.narrow_failure
        self.takes_narrow = alone.narrow_parameters and narrow.traced and not self.narrow_failure
        return profile if profile.traced else profiles_for(self.recipe, [whole])[0]

    def _chunked(self, alone: ProfileRequest) -> list[ProfileRequest]:
        """What one rank would most likely be asked for next, if its loss is computed in parts."""
        facts = facts_of(self.recipe)
        may_refuse = self.recipe.lora is not None  # if the output layer has an adapter
        if facts.kind != "reference" or may_refuse or "loss_chunks" in self.recipe.plan.fixed:
            return []
        samples = self.recipe.plan.micro_batch if "micro_batch" in self.recipe.plan.fixed else self.recipe.batch
        chunks = chunks_of(samples * (facts.sequence or 0), facts.vocabulary)
        return [replace(alone, loss_chunks=chunks)] if chunks > 1 else []

    def check_recomputed_blocks(self, plan: Plan) -> None:
        """Refuse to recompute more blocks than the model has, as a run would when it has built one."""
        if plan.recompute_blocks is None:  # a prediction of one plan needs no other trace
            return
        profile = self.trace()
        refusal = more_than_its_blocks(plan, profile.class_name or self.recipe.model.use, profile.block_count)
        if refusal is not None:
            with self.recipe.blamed():
                raise refusal

    def check_weights(self, plan: Plan) -> None:
        """Refuse a plan that gives the model weights in 16 bits, if it was traced with such and failed."""
        case = case_of(self.recipe, self.cluster, plan)
        failure = self.profile(plan).narrow_failure
        with self.recipe.blamed():
            check_supported(replace(case, model=replace(case.model, narrow_failure=failure)))

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Trace what these plans are predicted from, all in one go."""
        if self._profile is None:
            requests = list(dict.fromkeys(request_for(plan, self.cluster) for plan in plans))
            self._profiles |= zip(requests, profiles_for(self.recipe, requests), strict=True)

    def profile(self, plan: Plan) -> ModelProfile:
        if self._profile is not None:
            return self._profile
        request = request_for(plan, self.cluster)
        if request not in self._profiles:
            self._profiles[request] = profiles_for(self.recipe, [request])[0]
        return self._profiles[request]

    def rank_memory(self, plan: Plan) -> RankMemory:
        key = plan.model_dump_json()
        if key not in self._memories:
            found = predicted_memory(self.profile(plan), plan, self._memory_facts(plan))
            self._memories[key] = replace(found, memory=corrected_memory(found.memory, self.cluster.calibration))
        return self._memories[key]

    def memory(self, plan: Plan) -> MemoryPrediction:
        return self.rank_memory(plan).memory

    def least_bytes(self, plan: Plan) -> float:
        return least_bytes(self.profile(plan), plan, self._memory_facts(plan))

    def verdict(self, plan: Plan) -> Verdict:
        """By the numbers alone: what plans are chosen by, also where all of them are doubtful."""
        found, (needs, has) = self.rank_memory(plan), self.host_bytes(plan)
        if waits_on_host(plan) and needs > has:
            return "no"
        return verdict(found.memory, self._limit_bytes(plan), found.error)

    def _stated_verdict(self, plan: Plan) -> Verdict:
        """Nobody knows what else a model keeps that could not be traced, nor how much fits on an unknown GPU."""
        doubtful = not self.profile(plan).traced or self._limit_bytes(plan) is None
        found = self.verdict(plan)
        return "tight" if doubtful and found == "fits" else found

    def host_bytes(self, plan: Plan) -> tuple[int, int]:
        """What training needs on a node, and what there is. Saving can do without the copies, if training waits."""
        host = self.rank_memory(plan).host
        return host.peak - host.saving, round(self.cluster.memory_gib * GIB)

    def step(self, plan: Plan) -> StepPrediction | None:
        key = plan.model_dump_json()
        if key not in self._seconds:
            profile = self.profile(plan)
            found: StepPrediction | None
            if not profile.traced:  # what it computes besides products, and how often, is not known
                found = None
            elif self.device is not None:
                found = predicted_step(profile, plan, self.cluster, self.device, self._step_facts)
            else:
                share = hardware_flops(profile, plan) / plan.mesh.world_size
                found = step_at_achieved_rate(share, self.cluster.calibration, self._ranks_on_a_node(plan))
            self._seconds[key] = found
        return self._seconds[key]

    def seconds(self, plan: Plan) -> float | None:
        step = self.step(plan)
        return step.total if step is not None else None

    def launching_seconds(self, plan: Plan) -> float:
        """Of a step, that the device waits for the host to launch its work."""
        if self.device is None:
            return 0.0
        return launching_seconds(self.profile(plan), plan, self.cluster, self.device, self._step_facts)

    def prediction(self, plan: Plan) -> Prediction:
        profile, found, step = self.profile(plan), self.rank_memory(plan), self.step(plan)
        reached = throughput(profile, plan, step.total, self.device) if step is not None and step.total > 0 else None
        return Prediction(
            memory=found.memory,
            peak_at=found.peak_at,
            limit_bytes=self._limit_bytes(plan),
            memory_error=found.error,
            host_memory=found.host,
            step=step,
            step_error=self._step_error(plan) if step is not None else None,
            tokens_per_second=reached.tokens_per_second if reached else None,
            samples_per_second=reached.samples_per_second if reached else None,
            model_flops=model_flops(profile, plan),
            hardware_flops=hardware_flops(profile, plan),
            mfu=reached.mfu if reached else None,
            hfu=reached.hfu if reached else None,
            peak_flops=reached.peak_flops if reached else None,
            verdict=self._stated_verdict(plan),
            budget=self._budget(plan, step),
            basis=self._basis(profile, plan, found),
        )

    def _budget(self, plan: Plan, step: StepPrediction | None) -> BudgetPrediction | None:
        length = self.length
        if step is None or length is None:
            return None
        profile, facts, found = self.profile(plan), self._memory_facts(plan), self.rank_memory(plan)
        model = ModelSize(profile.parameters, profile.trained, optimizer_tensors=facts.optimizer_tensors)
        size = checkpoint_bytes(model, plan, averaged=facts.ema, adapters=facts.lora)
        stall = host_copy(plan, self.device).seconds(found.saved_bytes)
        if not facts.saves_in_background or not self._room_for_copies(plan):
            stall = max(stall, writing_seconds(size, plan, self.cluster))
        return budget(length, step.total, size, stall, plan, self.cluster)

    def _room_for_copies(self, plan: Plan) -> bool:
        return self.rank_memory(plan).host.peak <= self.cluster.memory_gib * GIB

    @functools.cached_property
    def length(self) -> Length | None:
        """How long the run is; None for epochs of data whose size is not known here."""
        dataset = dataset_length(self.recipe) if self.recipe.epochs is not None else None
        with self.recipe.blamed():
            return length_of(self.recipe, dataset, self.trace().tokens_per_sample)

    def _basis(self, profile: ModelProfile, plan: Plan, found: RankMemory) -> list[str]:
        how = "The model was traced operator by operator on fake tensors"
        said = [f"{how}; the stated error of memory is {found.error:.0%}."] if profile.traced else []
        said += [_sentence(note) for note in profile.notes]
        if self._under_a_cap(plan) and self.cluster.gpus_per_node:
            beside = f"the {self._context_bytes / GIB:.2f} GiB that the driver takes besides are not counted"
            said.append(f"plan.memory_limit_gib is a limit on what torch allocates: {beside}.")
        if any(op.kind == "convolution" for part in profile.parts for op in part.forward):
            said.append("Memory is that from the second step on: in the first, cuDNN tries algorithms in what is free.")
        if not self.cluster.gpus_per_node:
            said.append("There is no GPU: memory is what a GPU would hold.")
            if profile.traced and self.step(plan) is None:
                said.append("How fast the processors are, is not known: no time is predicted.")
        elif self._device_bytes(plan) is None:
            said.append(f"How much memory {self.cluster.gpu_name or 'the GPU'} has is not known, nor whether it fits.")
        if self.cluster.gpus_per_node and self.device is None:
            said.append(f"How fast {self.cluster.gpu_name or 'the GPU'} is, is not known: no time is predicted.")
        elif self.device is not None and profile.traced:
            fabric = fabric_of(self.cluster, plan.ranks_per_gpu)
            ranks = plan.mesh.world_size
            used = {"links.intra": ranks > 1, "links.inter": ranks > fabric.ranks_per_node}
            links = [note for note in fabric.assumed if used[note.partition(" ")[0]]]
            said += [_sentence(note) for note in (*self.device.notes, *links)]
            said += self._waiting_basis(plan)
        said += calibration_basis(self.cluster)
        if self.length is None or self.step(plan) is None:
            return said
        said += budget_basis(self.cluster, plan, host_copy(plan, self.device))
        if not self.recipe.checkpoint.background:
            said.append("With checkpoint.background: false, training waits until a checkpoint is written.")
        elif not self._room_for_copies(plan):
            said.append(
                f"A node has no host memory for copies of the state ({found.host.peak / GIB:.0f} GiB needed, "
                f"{self.cluster.memory_gib:g} there): training waits until a checkpoint is written."
            )
        return said

    def _waiting_basis(self, plan: Plan) -> list[str]:
        """What a step waits for besides the device and its links."""
        said = ["Waiting for data counts as no time: how fast samples are loaded is not known before a run."]
        if plan.cuda_graph:
            return [
                *said,
                f"The step is launched as graphs, which takes the host {GRAPHS_SECONDS * 1000:.3g} ms: of the order"
                " that was measured beside an H200.",
            ]
        lacking, step = self.launching_seconds(plan), self.step(plan)
        if step is not None and lacking > NOTICED * step.total:
            said.append(
                f"The host holds up the step: {lacking * 1000:.3g} ms of it the device waits for operators to be"
                " launched. That depends on the host's processor; these are figures of the one beside the H200 that"
                " was measured."
            )
        return said

    def _request(self, plan: Plan) -> ProfileRequest:
        around = surroundings(self.recipe, self.cluster, plan, takes_narrow=True)  # which the trace is to find out
        fixed = self.recipe.plan.fixed
        values = {
            name: getattr(self.recipe.plan, name) if name in fixed else around[name][0]
            for name in ("precision", "channels_last", "narrow_weights")
        }
        values["loss_chunks"] = self.recipe.plan.loss_chunks
        return request_for(plan.model_copy(update=values), self.cluster)

    def _device_bytes(self, plan: Plan) -> int | None:
        if self.cluster.gpus_per_node:
            return device_bytes(self.cluster)
        return round(self.cluster.memory_gib * GIB / self._ranks_on_a_node(plan))

    def _limit_bytes(self, plan: Plan) -> int | None:
        return limit_bytes(plan, self._device_bytes(plan), self._context_bytes)

    def _under_a_cap(self, plan: Plan) -> bool:
        return under_a_cap(plan, self._device_bytes(plan), self._context_bytes)

    @functools.cached_property
    def _context_bytes(self) -> int:
        """What the driver takes of a GPU."""
        if not self.cluster.gpus_per_node:
            return 0
        context = device_memory(capability_of(self.cluster)).context_bytes
        return round(context * self.cluster.calibration.factor("device_context"))

    def _ranks_on_a_node(self, plan: Plan) -> int:
        return min(plan.mesh.world_size, ranks_on_a_node(self.cluster, plan))

    def _step_error(self, plan: Plan) -> float:
        return step_error(
            plan,
            self.device,
            self.cluster.calibration,
            of_nvidia=capability_of(self.cluster) is not None,
            across_nodes=plan.mesh.world_size > ranks_on_a_node(self.cluster, plan),
        )

    def _memory_facts(self, plan: Plan) -> MemoryFacts:
        kind = (self._ranks_on_a_node(plan), plan.data_on_device, self._under_a_cap(plan))
        if kind not in self._facts:
            facts = memory_facts(self.recipe, capability_of(self.cluster), HostFacts(ranks_per_node=kind[0]))
            if plan.data_on_device:
                facts = replace(facts, resident_data_bytes=resident_bytes(self.recipe))
            if not self.cluster.gpus_per_node:
                facts = replace(facts, device=NO_GPU, updates_in_one_pass=False)
            elif self._under_a_cap(plan):
                facts = replace(facts, device=replace(facts.device, context_bytes=0))
            self._facts[kind] = facts
        return self._facts[kind]


def _sentence(text: str) -> str:
    begins = text if text.startswith("links.") else text[:1].upper() + text[1:]
    return begins.rstrip(".") + "."

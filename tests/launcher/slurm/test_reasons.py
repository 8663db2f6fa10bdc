"""Every reason for which Slurm lets a job wait has words that a person understands."""

from __future__ import annotations

import pytest

from gradus.launcher.slurm.reasons import ended_words, explained_reason

# All that Slurm 22.05 has (the texts of job_reason_string in its library).
REASONS = """
None Priority Resources Dependency PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive
JobHeldAdmin JobHeldUser BeginTime Licenses AssociationJobLimit AssociationResourceLimit AssociationTimeLimit
Reservation ReqNodeNotAvail FrontEndDown SchedDefer NodeDown BadConstraints SystemFailure JobLaunchFailure
NonZeroExitCode TimeLimit InactiveLimit InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit QOSResourceLimit
QOSTimeLimit BlockMaxError BlockFreeAction Cleaning Prolog QOSNotAllowed AccountNotAllowed
DependencyNeverSatisfied QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit
QOSGrpMemLimit QOSGrpNodeLimit QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerJobLimit
QOSMaxCpuMinutesPerJobLimit QOSMaxNodePerJobLimit QOSMaxWallDurationPerJobLimit QOSMaxCpuPerUserLimit
QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit QOSMinCpuNotSatisfied AssocGrpCpuLimit
AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit AssocGrpNodeLimit
AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit AssocMaxCpuMinutesPerJobLimit
AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxSubmitJobLimit JobHoldMaxRequeue JobArrayTaskLimit
BurstBufferResources BurstBufferStageIn BurstBufferOperation PowerNotAvail PowerReserved AssocGrpUnknown
AssocGrpUnknownMinutes AssocGrpUnknownRunMinutes AssocMaxUnknownPerJob AssocMaxUnknownPerNode
AssocMaxUnknownMinutesPerJob AssocMaxCpuPerNode AssocGrpMemMinutes AssocGrpMemRunMinutes AssocMaxMemPerJob
AssocMaxMemPerNode AssocMaxMemMinutesPerJob AssocGrpNodeMinutes AssocGrpNodeRunMinutes AssocMaxNodeMinutesPerJob
AssocGrpEnergy AssocGrpGRES AssocGrpGRESMinutes AssocGrpGRESRunMinutes AssocMaxGRESPerJob AssocMaxGRESPerNode
AssocMaxGRESMinutesPerJob AssocGrpLicense AssocMaxLicensePerJob AssocGrpBB AssocMaxBBPerJob AssocGrpBilling
QOSGrpUnknown QOSMaxUnknownPerJob QOSMinUnknown QOSMaxCpuPerNode QOSGrpMemoryMinutes QOSMaxMemoryPerJob
QOSMaxMemoryPerUser QOSMinMemory QOSMinNode QOSGrpGRES QOSMaxGRESPerJob QOSMaxGRESPerNode QOSMaxGRESPerUser
QOSMinGRES QOSGrpLicense QOSGrpBB QOSMinBB QOSGrpBilling QOSMinBilling ReservationDeleted DeadLine MaxBBPerAccount
MaxCpuPerAccount MaxGRESPerAccount MaxNodePerAccount MaxMemoryPerAccount MaxJobsPerAccount MaxSubmitJobsPerAccount
MaxBillingPerAccount PartitionConfig AccountingPolicy FedJobLock OutOfMemory MaxMemPerLimit
""".split()  # noqa: SIM905


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_has_plain_words(reason: str) -> None:
    found = explained_reason(reason)
    assert "does not say more" not in found.words
    assert reason not in found.words
    assert found.text.endswith(f"({reason})" if reason != "None" else found.words), "of no reason there is no word"
    assert found.words[0].islower() or found.words.startswith("Slurm")


def test_a_reason_that_nobody_knows_is_shown_as_it_is() -> None:
    assert explained_reason("SomethingNew").text == "Slurm does not say more than this (SomethingNew)"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("job requeued in held state", "it was stopped and is held"),
        ("job_requeued_in_held_state", "it was stopped and is held"),
        ("launch failed requeued held", "could not start it"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "are down"),
    ],
)
def test_what_slurm_writes_in_place_of_a_code_is_understood(said: str, words: str) -> None:
    assert words in explained_reason(said).words


def test_the_nodes_that_are_missing_are_named() -> None:
    for said in ("ReqNodeNotAvail, UnavailableNodes:n[3-4]", "ReqNodeNotAvail,_UnavailableNodes:n[3-4]"):
        assert "n[3-4]" in explained_reason(said).words
    assert explained_reason("ReqNodeNotAvail, UnavailableNodes:").words.endswith("maintenance")


def test_limits_say_whose_and_of_what() -> None:
    assert explained_reason("QOSMaxGRESPerUser").words == "its QoS does not allow so many GPUs for each user"
    assert (
        explained_reason("AssocMaxWallDurationPerJobLimit").words
        == "your account does not allow so much time for a job"
    )
    assert "all jobs of your account together" in explained_reason("AssocGrpNodeLimit").words
    assert "fewer GPUs" in explained_reason("QOSMinGRES").words


def test_ends_have_words_too() -> None:
    assert ended_words("NODE_FAIL") == "one of its nodes failed"
    assert ended_words("CANCELLED by 1000") == "somebody took it out of the queue"
    assert ended_words("RUNNING") is None

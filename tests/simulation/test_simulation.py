"""Run some schedules in every test run, and check that planted bugs are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import rare
from tests.simulation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
BATCH = 6
EASY_MUTATIONS = ("releases_are_dropped", "preemptions_count_as_failures", "requests_are_not_saved")
MORE_MUTATIONS = (
    "a_gap_in_one_listing_counts_as_gone",
    "secrets_are_never_deleted",
    "failures_are_not_counted",
    "decisions_use_stale_records",
)
"""Mutations that the first schedules find; `python -m tests.simulation.mutations` runs all."""

CLEAN_AT_THE_END = """
from dataclasses import replace
from tests.simulation.schedule import FAULT_PERIOD, Incident, Schedule, generate_schedule
from tests.simulation.simulation import simulate

drawn = generate_schedule(1).jobs[0]
job = replace(drawn, at=0.0, program=replace(drawn.program, bugs=(), steps=3))
clean = Incident(FAULT_PERIOD, "clean")
outcomes = [simulate(Schedule(seed, (job,), (clean,))) for seed in range(20)]
print([violation for outcome in outcomes for violation in outcome.violations])
"""
"""Run twenty schedules of one job, whose user cleans it at the last moment."""


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a new process with a fixed hash seed."""
    environment_variables = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment_variables,
        capture_output=True,
        text=True,
        check=False,
    )


def simulation(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a module of the simulation."""
    return python("-m", *arguments)


@pytest.mark.long
@pytest.mark.parametrize("first", [1, *rare(*range(1 + BATCH, 240, BATCH))])
def test_no_schedule_violates_an_invariant(first: int) -> None:
    arguments = ("--seeds", str(BATCH), "--first", str(first), "--workers", "1")
    result = simulation("tests.simulation", *arguments)
    assert result.stdout.endswith(f"{BATCH} schedules, 0 broken\n"), result.stdout + result.stderr


def test_a_job_is_judged_after_its_last_command_is_answered() -> None:
    # The seed decides whether the server executes the command before or after the check.
    result = python("-W", "ignore", "-c", CLEAN_AT_THE_END)
    assert result.stdout == "[]\n", result.stdout + result.stderr


def test_the_same_seed_gives_the_same_schedule_in_another_process() -> None:
    outputs = {simulation("tests.simulation", "--replay", "3").stdout for _ in range(2)}
    (output,) = outputs
    assert "fingerprint" in output.splitlines()[-1]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_function_that_a_planted_bug_replaces_exists(mutation: Mutation) -> None:
    with mutation():
        pass


@pytest.mark.parametrize("mutations", [EASY_MUTATIONS, *rare((MORE_MUTATIONS,))])
def test_planted_bugs_are_found(mutations: tuple[str, ...]) -> None:
    result = simulation("tests.simulation.mutations", "--workers", "1", "--seeds", "20", *mutations)
    assert result.stdout.endswith("0 not found\n"), result.stdout + result.stderr

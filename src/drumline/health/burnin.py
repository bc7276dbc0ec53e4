"""The burn-in: rounds of tests, cheapest first, until the time is used up.

Rounds differ in their inputs, and repetition finds intermittent faults. The hosts of a slice run
the burn-in together and exchange their observations after every test, so their verdicts are equal.
The burn-in stops when a chip certainly fails.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from drumline.chips.catalogue import device_kind
from drumline.health.arithmetic import (
    run_functions_test,
    run_matmul_bf16_test,
    run_matmul_int8_test,
)
from drumline.health.findings import Finding, Observation, find_faults, merge_hosts
from drumline.health.host_checks import (
    check_devices,
    check_host,
    current_slice,
    describe_device,
    local_ids,
)
from drumline.health.inputs import Sizes, sizes_for
from drumline.health.links import run_links_test
from drumline.health.memory import run_memory_test
from drumline.health.report import FAIL, CheckOutcome, HealthReport
from drumline.health.runner import ChipRunner
from drumline.health.summary import RunTimings, build_report

ChipTest = Callable[[ChipRunner, Sizes, int], Iterator[Observation]]
CHIP_TESTS: tuple[ChipTest, ...] = (
    run_matmul_bf16_test,
    run_matmul_int8_test,
    run_functions_test,
    run_memory_test,
    run_links_test,
)
HOST_TIMEOUT = 600
"""Seconds to wait for another host, which may compile a program that this host has cached."""

_exchange_ids = itertools.count()


def burn_in(devices: Sequence[Any] | None = None, seconds: float = 30) -> HealthReport:
    """Test chips and hosts.

    Args:
        devices: JAX devices, by default all. On a slice, call this on every host with the devices
            of all hosts.
        seconds: The duration, which is exceeded if a single round takes longer.
    """
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ValueError(f"seconds is {seconds!r}: say how long to test, such as 30")
    if devices is not None and not devices:
        raise ValueError("devices is empty: name some, or leave it out to test all")
    if devices is not None and len({device.id for device in devices}) < len(devices):
        raise ValueError("devices has one twice, or some of several platforms: name each one once")
    started_at = time.monotonic()
    host_outcomes = check_host()  # before JAX opens the chips' files
    runner = ChipRunner(jax.devices() if devices is None else devices)
    if not runner.local_devices:
        raise ValueError("none of the devices belongs to this host: add some of its devices")
    try:
        return run_burn_in(
            runner,
            sizes_for(list(runner.local_devices)),
            host_outcomes,
            expected_devices=_expected_devices(runner) if devices is None else None,
            elapsed=lambda: time.monotonic() - started_at,
            seconds=seconds,
        )
    finally:
        runner.close()


def run_burn_in(
    runner: ChipRunner,
    sizes: Sizes,
    host_outcomes: Mapping[str, CheckOutcome],
    *,
    expected_devices: int | None,
    elapsed: Callable[[], float],
    seconds: float,
    chip_tests: Sequence[ChipTest] = CHIP_TESTS,
) -> HealthReport:
    """Test the chips of a runner.

    Args:
        runner: Runs the programs.
        sizes: The sizes of the tests.
        host_outcomes: The outcomes of this host's own checks.
        expected_devices: The number of devices per host, or None if unknown.
        elapsed: Returns the seconds since the start.
        seconds: The duration.
        chip_tests: The tests of a round, in order.
    """
    devices = [describe_device(device) for device in runner.devices]
    exchanged = exchange_between_hosts(
        [
            {name: asdict(outcome) for name, outcome in host_outcomes.items()},
            local_ids(runner.local_devices),
        ]
    )
    hosts = [
        {name: CheckOutcome(**outcome) for name, outcome in outcomes.items()}
        for outcomes, _ in exchanged
    ]
    # JAX numbers its devices without gaps. If the bus shows the missing chip, the ids of the
    # devices would show a different chip.
    ids_of_hosts = [
        [] if outcomes.get("chips", CheckOutcome()).verdict == FAIL else ids
        for outcomes, (_, ids) in zip(hosts, exchanged, strict=True)
    ]
    for host, outcome in check_devices(devices, ids_of_hosts, expected_devices).items():
        hosts[host]["devices"] = outcome
    kinds = {device.id: device.kind for device in devices}
    findings: list[Finding] = []
    timings: dict[str, RunTimings] = {}
    round_index = 0
    while True:
        for run_test in chip_tests:
            local = [seen.as_json() for seen in run_test(runner, sizes, round_index)]
            observations = merge_hosts(
                Observation.from_json(fields)
                for host_fields in exchange_between_hosts(local)
                for fields in host_fields
            )
            findings += find_faults(observations, kinds)
            for observation in observations:
                timings.setdefault(observation.test, RunTimings()).add(observation)
            # While the bad chip is unknown, a further round may find it.
            if any(f.verdict == FAIL and f.device is not None for f in findings):
                return build_report(devices, hosts, findings, timings, elapsed())
        round_index += 1
        # The clock of host 0 decides, so that all hosts stop after the same round.
        if (elapsed_seconds := exchange_between_hosts(elapsed())[0]) >= seconds:
            return build_report(devices, hosts, findings, timings, elapsed_seconds)


def exchange_between_hosts(value: Any) -> list[Any]:
    """Return the values of all hosts, by host index. All hosts must make the same calls.

    This uses the key-value store of JAX's coordinator. A collective would use the chips and links
    under test.
    """
    if jax.process_count() == 1:
        return [value]
    # JAX has no public name for the client.
    from jax._src import distributed

    store: Any = distributed.global_state.client
    prefix = f"drumline/burnin/{next(_exchange_ids)}"
    store.key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(value))
    return [
        json.loads(store.blocking_key_value_get(f"{prefix}/{host}", 1000 * HOST_TIMEOUT))
        for host in range(jax.process_count())
    ]


def _expected_devices(runner: ChipRunner) -> int | None:
    """Return the number of devices per host of the job's slice. A CPU device counts as a chip."""
    job_slice = current_slice()
    catalogue_entry = device_kind(runner.devices[0].device_kind)
    if job_slice is None or (catalogue_entry is not None and catalogue_entry.chip.kind != "tpu"):
        return None
    return job_slice.chips_per_host * (catalogue_entry.devices_per_chip if catalogue_entry else 1)

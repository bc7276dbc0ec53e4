"""The burn-in: tests, cheapest first, round after round until the time is used up.

Each round has other numbers in it, and a fault that comes now and then is found by repetition. All
hosts of a slice do this together: after each test each tells the others what it observed, so that
all of them come to the same verdict by the same rules. The first bad chip ends it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from drumline.chips.catalogue import device_kind
from drumline.health.bench import Bench
from drumline.health.checks.arithmetic import functions, matmul_bf16, matmul_int8
from drumline.health.checks.devices import check_devices, described, own_numbers
from drumline.health.checks.links import links
from drumline.health.checks.machine import check_machine, slice_here
from drumline.health.checks.memory import memory
from drumline.health.checks.sizes import Sizes, sizes_for
from drumline.health.judging import Finding, findings
from drumline.health.observations import Observation, from_json, joined
from drumline.health.report import FAIL, BurnIn, CheckOutcome
from drumline.health.sharing import shared
from drumline.health.summary import RunTimes, summarise

Check = Callable[[Bench, Sizes, int], Iterator[Observation]]
CHECKS: tuple[Check, ...] = (
    matmul_bf16,
    matmul_int8,
    functions,
    memory,
    links,
)


def burn_in(devices: Sequence[Any] | None = None, seconds: float = 30) -> BurnIn:
    """Test chips and hosts.

    Args:
        devices: JAX devices; all of them if not said. On several hosts, those of all hosts, and
            every host must call this.
        seconds: how long to go on; every test is run at least once, however short that is.
    """
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ValueError(f"seconds is {seconds!r}: say how long to test, such as 30")
    if devices is not None and not devices:
        raise ValueError("devices is empty: name some, or leave it out to test all")
    if devices is not None and len({device.id for device in devices}) < len(devices):
        raise ValueError("devices has one twice, or some of several platforms: name each one once")
    began = time.monotonic()
    machine = check_machine()  # before JAX opens the chips' files
    bench = Bench(jax.devices() if devices is None else devices)
    if not bench.local:
        raise ValueError("none of the devices belongs to this host, which would have no part in it")
    try:
        return burn(
            bench,
            sizes_for(list(bench.local)),
            machine,
            expected=_expected(bench) if devices is None else None,
            elapsed=lambda: time.monotonic() - began,
            seconds=seconds,
        )
    finally:
        bench.close()


def burn(
    bench: Bench,
    sizes: Sizes,
    machine: Mapping[str, CheckOutcome],
    *,
    expected: int | None,
    elapsed: Callable[[], float],
    seconds: float,
    checks: Sequence[Check] = CHECKS,
) -> BurnIn:
    """Test what is on a bench.

    Args:
        bench: where programs run.
        sizes: how large they are.
        machine: what this host said of itself.
        expected: how many devices each host should have, if that is known.
        elapsed: the seconds since the beginning.
        seconds: how many of them to use.
        checks: the tests of a round, in order.
    """
    devices = [described(device) for device in bench.devices]
    numbers = own_numbers(bench.local)
    told = shared([{name: asdict(test) for name, test in machine.items()}, numbers])
    hosts = [{name: CheckOutcome(**test) for name, test in tests.items()} for tests, _ in told]
    # Where the bus shows which chip is missing, the numbers of those that are left do not: JAX
    # counts them anew.
    known = [
        [] if tests.get("chips", CheckOutcome()).verdict == FAIL else own
        for tests, (_, own) in zip(hosts, told, strict=True)
    ]
    for host, outcome in check_devices(devices, known, expected).items():
        hosts[host]["devices"] = outcome
    kinds = {device.id: device.kind for device in devices}
    found: list[Finding] = []
    times: dict[str, RunTimes] = {}
    turn = 0
    while True:
        for check in checks:
            observed = _observed(check, bench, sizes, turn)
            found += findings(observed, kinds)
            for seen in observed:
                times.setdefault(seen.test, RunTimes()).add(seen)
            if any(_named(finding) for finding in found):
                return summarise(devices, hosts, found, times, elapsed())
        turn += 1
        # By host 0's clock, so that all stop after the same round.
        if (taken := shared(elapsed())[0]) >= seconds:
            return summarise(devices, hosts, found, times, taken)


def _observed(check: Check, bench: Bench, sizes: Sizes, turn: int) -> list[Observation]:
    """What all hosts observed in one test of one round."""
    told = shared([seen.as_json() for seen in check(bench, sizes, turn)])
    return joined(from_json(seen) for by_host in told for seen in by_host)


def _named(finding: Finding) -> bool:
    """Whether it is settled. Where it is not known who is wrong, another round may tell."""
    return finding.verdict == FAIL and finding.device is not None


def _expected(bench: Bench) -> int | None:
    """The devices of each host, by the slice that the job names; a CPU emulates one chip."""
    here = slice_here()
    device = bench.devices[0]
    kind = device_kind(device.device_kind)
    if here is None or (kind is not None and kind.chip.kind != "tpu"):
        return None
    return here.chips_per_host * (kind.devices_per_chip if kind else 1)

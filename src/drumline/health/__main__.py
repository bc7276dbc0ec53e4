"""`python3 health.pyz --job --seconds N`: the burn-in on a job's host, before its program.

Every host of the slice runs it, joins the others, and ends with the same verdict: exit code 0 for
`pass` and `warn`, 86 for `fail`, after one accusation for each bad chip. The report is left beside
the heartbeat. Whatever goes wrong that says nothing about hardware is a warning: a host must never
be accused because a package is missing or a connection failed.
"""

import argparse
import json
import os
import sys
import threading
from contextlib import suppress

from drumline.health.accusation import BURN_IN_FAILED
from drumline.health.report import FAIL, WARN, BurnIn

PATIENCE = 900.0
"""Seconds beyond those asked for until a burn-in that hangs is given up: a collective in which
another host never arrives has no end of its own."""


def main(arguments: list[str] | None = None) -> int:
    """Run the burn-in; the exit code."""
    words = argparse.ArgumentParser(prog="drumline.health", description="Test this host's chips.")
    words.add_argument("--seconds", type=_seconds, default=30.0, metavar="N", help="how long")
    words.add_argument(
        "--job", action="store_true", help="join the job's hosts, and leave burnin.json"
    )
    asked = words.parse_args(arguments)
    timer = threading.Timer(asked.seconds + PATIENCE, _give_up, [asked.job])
    timer.daemon = True
    timer.start()
    try:
        report = _tested(asked.seconds, asked.job)
    except ImportError as missing:
        report = BurnIn(WARN, f"chips were not tested: {missing}; add jax to the job's python")
    except Exception as trouble:
        first = (str(trouble).splitlines() or [""])[0]
        report = BurnIn(WARN, f"chips were not tested: {type(trouble).__name__}: {first}"[:500])
    timer.cancel()
    _tell(report, asked.job)
    return BURN_IN_FAILED if report.verdict == FAIL else 0


def _tested(seconds: float, job: bool) -> BurnIn:
    from drumline.health.burnin import burn_in

    if not job:
        return burn_in(seconds=seconds)
    import jax

    from drumline import distributed

    distributed.initialize()
    report = burn_in(seconds=seconds)
    # The program that follows joins the same hosts anew, at the same address.
    if jax.distributed.is_initialized():
        with suppress(Exception):
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    return report


def _tell(report: BurnIn, job: bool) -> None:
    if job:
        _leave(report)
    print(f"burn-in: {report.verdict}, {report.seconds:.0f} s: {report.said}")
    for accusation in report.accusations:
        print(accusation.sentence)
    sys.stdout.flush()


def _leave(report: BurnIn) -> None:
    """Write the report beside the heartbeat, whole or not at all."""
    heartbeat = os.environ.get("DRUMLINE_HEARTBEAT")
    if not heartbeat:
        return
    file = os.path.join(os.path.dirname(heartbeat), "burnin.json")
    draft = f"{file}.{os.getpid()}.draft"
    with suppress(OSError):
        with open(draft, "w") as out:
            json.dump(report.as_dict(), out)
        os.replace(draft, file)


def _give_up(job: bool) -> None:
    _tell(BurnIn(WARN, "chips were not tested to the end: the burn-in hung, and was given up"), job)
    os._exit(0)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: write how many seconds to test, such as 30")


if __name__ == "__main__":
    # Not sys.exit: what JAX leaves for the end of a process waits for hosts that have left.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

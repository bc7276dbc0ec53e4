"""`python3 health.pyz --job --seconds N`: the burn-in on a job's host, before its program.

The hosts of the slice run this together and end with the same verdict. The exit code is 0 for
`pass` and `warn`, and 86 for `fail`, after a fault report per bad chip. The health report is
written next to the heartbeat. A missing package or a failed connection is a warning, never a fault.
"""

import argparse
import json
import os
import sys
import threading
from contextlib import suppress

from drumline.health.fault_report import BURN_IN_FAILED
from drumline.health.report import FAIL, WARN, HealthReport

HANG_TIMEOUT = 900.0
"""Seconds beyond the duration after which a burn-in counts as hung, for example in a collective
that a host never joins."""


def main(arguments: list[str] | None = None) -> int:
    """Run the burn-in and return the exit code."""
    parser = argparse.ArgumentParser(prog="drumline.health", description="Test this host's chips.")
    parser.add_argument(
        "--seconds", type=_parse_seconds, default=30.0, metavar="N", help="duration in seconds"
    )
    parser.add_argument(
        "--job", action="store_true", help="join the job's hosts and write burnin.json"
    )
    options = parser.parse_args(arguments)
    timer = threading.Timer(options.seconds + HANG_TIMEOUT, _end_hung_burn_in, [options.job])
    timer.daemon = True
    timer.start()
    try:
        report = _run(options.seconds, options.job)
    except ImportError as error:
        report = HealthReport(WARN, f"chips were not tested: {error}; add jax to the job's python")
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        message = f"chips were not tested: {type(error).__name__}: {first_line}"
        report = HealthReport(WARN, message[:500])
    timer.cancel()
    _publish(report, options.job)
    return BURN_IN_FAILED if report.verdict == FAIL else 0


def _run(seconds: float, job: bool) -> HealthReport:
    from drumline.health.burnin import burn_in

    if not job:
        return burn_in(seconds=seconds)
    import jax

    from drumline import distributed

    distributed.initialize()
    report = burn_in(seconds=seconds)
    # The job's program joins the same hosts again, at the same address.
    if jax.distributed.is_initialized():
        with suppress(Exception):
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    return report


def _publish(report: HealthReport, job: bool) -> None:
    if job:
        _write_report(report)
    print(f"burn-in: {report.verdict}, {report.seconds:.0f} s: {report.message}")
    for fault in report.faults:
        print(fault.sentence)
    sys.stdout.flush()


def _write_report(report: HealthReport) -> None:
    """Write the report next to the heartbeat, atomically."""
    heartbeat = os.environ.get("DRUMLINE_HEARTBEAT")
    if not heartbeat:
        return
    file = os.path.join(os.path.dirname(heartbeat), "burnin.json")
    draft = f"{file}.{os.getpid()}.draft"
    with suppress(OSError):
        with open(draft, "w") as output:
            json.dump(report.as_dict(), output)
        os.replace(draft, file)


def _end_hung_burn_in(job: bool) -> None:
    _publish(
        HealthReport(WARN, "chips were not fully tested: the burn-in hung and was stopped"), job
    )
    os._exit(0)


def _parse_seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: write how many seconds to test, such as 30")


if __name__ == "__main__":
    # Not sys.exit: JAX's exit handlers would wait for hosts that have already left.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""`drumline init --probe`: confirm, run the probe, and report what may be left of it."""

import asyncio
import contextlib
import signal
import time

import typer

from drumline.cli.connect import confirm
from drumline.cli.rendering.text import sanitize


def run_probe(zone: str | None, accelerator: str | None, capacity: str | None, yes: bool) -> bool:
    """Request a slice, reach it and delete it. Return True if every step succeeded."""
    from drumline.cloud.google.rest import Dependencies
    from drumline.hosts.ssh import ensure_key_pair
    from drumline.jobs import probe as probes
    from drumline.jobs.config import read
    from drumline.jobs.connection import home_folder
    from drumline.jobs.folders import Folders
    from drumline.jobs.server.process import connect

    config = read(home_folder())
    plan = probes.plan_probe(config, zone, accelerator, capacity)
    typer.echo(
        f"the probe requests a {plan.accelerator} ({plan.capacity}) in {plan.zone}, project "
        f"{plan.project}, which {plan.cost}; it logs in to its hosts and deletes it"
    )
    confirm("init --probe", "Continue?", yes)
    folders = Folders(config.home)
    path = config.home / f"probe-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    report = probes.ProbeReport(path, lambda line: typer.echo(sanitize(line)))
    known_hosts = folders.known_hosts / path.stem

    async def run() -> bool:
        cloud = connect(config, Dependencies(on_answer=report.answer))
        access = probes.ProbeAccess(folders.key, ensure_key_pair(folders.key), known_hosts)
        limits = probes.probe_limits(config)
        probe = probes.Probe(cloud, plan, config.slice_settings, access, report, limits)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(name, probe.interrupt)
        try:
            return await probe.run()
        finally:
            await cloud.close()

    try:
        succeeded = asyncio.run(run())
    finally:
        report.close()
        with contextlib.suppress(OSError):
            known_hosts.unlink(missing_ok=True)
        typer.echo(f"the report, without tokens, keys and e-mail addresses: {path}")
    return succeeded

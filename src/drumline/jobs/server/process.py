"""The server process: the supervisor's loop, and its HTTP API on a Unix socket.

    python -m drumline.jobs.server [--stay]

One per home folder; a second server finds the lock held and exits quietly. It may be killed at any
moment: programs, slices and the store do not need it, and the next server continues where it was.
With nothing to do for a while it exits, unless it was started to stay.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from drumline.cloud.google.infra_health import InfraHealth
from drumline.cloud.google.tpu_api import GOOGLE, TpuApi
from drumline.cloud.protocol import Cloud
from drumline.cloud.visits import LAST_CALLERS, Visits
from drumline.jobs.config import Config, ConfigError, read
from drumline.jobs.connection import home_folder
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.folders import Folders
from drumline.jobs.server.api import JobsApi
from drumline.jobs.server.service import JobService
from drumline.jobs.server.verbs import Mistake
from drumline.jobs.store.records import Store
from drumline.jobs.store.schema import SchemaError

log = logging.getLogger(__name__)
HOME_CHECK_SECONDS = 5.0


def connect(config: Config) -> Cloud:
    """The cloud that the settings name; the emulator is started if it is not running."""
    if config.local:
        from drumline.cloud.local import emulated_cloud

        start_emulator(config)
        home = Path(config.endpoint) if config.endpoint else Folders(config.home).emulator
        return emulated_cloud(config.project, home)
    from drumline.cloud.google.credentials import GoogleCredentials

    url = config.endpoint or GOOGLE
    return TpuApi(config.project, base_url=url, credentials=GoogleCredentials())


def witness_of(config: Config) -> InfraHealth | None:
    """Who else is believed about hosts, if the settings name somebody and the cloud is Google's."""
    if config.health_source is None or config.local:
        return None
    from drumline.cloud.google.credentials import GoogleCredentials

    return InfraHealth(config.project, credentials=GoogleCredentials())


def start_emulator(config: Config) -> None:
    """Start our own emulator if it is the cloud and is not running; it exits when idle."""
    from drumline.cloud.emulator import launch

    if config.local and not config.endpoint:
        try:
            launch.ensure_running(Folders(config.home).emulator)
        except launch.EmulatorError as wrong:
            raise Mistake(f"the emulator does not start: {wrong}", 502) from None


def ssh_key(folders: Folders) -> str:
    """The public half of our key, which is made once.

    It is kept in a file of its own, so that a start need not load SSH to derive it.
    """
    public = folders.key.with_suffix(".pub")
    try:
        # A public half that is older belongs to a key that was replaced.
        if public.stat().st_mtime_ns >= folders.key.stat().st_mtime_ns:
            return public.read_text().strip()
    except FileNotFoundError:
        pass
    import asyncssh

    if folders.key.exists():
        key = asyncssh.read_private_key(folders.key)
    else:
        key = asyncssh.generate_private_key("ssh-ed25519", comment="drumline")
        _write_private(folders.key, key.export_private_key())
    _write_private(public, key.export_public_key())
    return key.export_public_key().decode().strip()


def _write_private(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    new.rename(path)


async def _home_is_gone(door: Path) -> None:
    """Return when no caller can reach us any more: the socket was removed or replaced."""
    ours = door.stat().st_ino
    with contextlib.suppress(FileNotFoundError):
        while door.stat().st_ino == ours:
            await asyncio.sleep(HOME_CHECK_SECONDS)


async def serve(config: Config, stay: bool = False) -> None:
    """Run until stopped, or, without `stay`, until there was nothing to do for a while."""
    folders = Folders(config.home)
    store = Store(folders.database)
    cloud = await asyncio.to_thread(connect, config)
    supervisor = Supervisor(
        store, cloud, config, ssh_key(folders), health_source=witness_of(config)
    )
    stop = asyncio.Event()
    service = JobService(supervisor)
    api = JobsApi(
        service, stop.set, lambda: visits.leaves_in(), lambda: start_emulator(supervisor.config)
    )
    patience = None if stay else config.idle_seconds
    visits = Visits(api.application(), supervisor.busy, patience, unnoticed={"/status"})
    folders.socket.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folders.socket))
    folders.socket.chmod(0o600)
    web = uvicorn.Server(uvicorn.Config(visits, log_level="warning", lifespan="off"))
    web.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    listening = asyncio.create_task(web.serve(sockets=[door]))
    supervising = asyncio.create_task(supervisor.run())
    stopping = asyncio.create_task(stop.wait())
    homeless = asyncio.create_task(_home_is_gone(folders.socket))
    needless = asyncio.create_task(visits.over())
    try:
        ways_out = {listening, supervising, stopping, homeless, needless}
        await asyncio.wait(ways_out, return_when=asyncio.FIRST_COMPLETED)
        if needless.done():
            log.info("nothing to do for %.0f min: leaving", config.idle_seconds / 60)
            folders.socket.unlink(missing_ok=True)
            await asyncio.sleep(LAST_CALLERS)
    finally:
        web.should_exit = True
        web.force_exit = True
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await listening
        stopping.cancel()
        homeless.cancel()
        needless.cancel()
        await supervisor.close()
        store.close()
        folders.socket.unlink(missing_ok=True)


def main() -> None:
    """Acquire the lock and serve; it is no error if a server runs already."""
    os.umask(0o077)
    home = home_folder()
    folders = Folders(home)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("asyncssh", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with folders.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            asyncio.run(serve(read(home), stay="--stay" in sys.argv[1:]))
        except (ConfigError, SchemaError) as wrong:
            sys.exit(str(wrong))

"""The server process: the supervisor's loop, and its HTTP API on a Unix socket.

    python -m drumline.jobs.server [--stay]

A home folder has one server, which holds a lock; a second one exits without an error. The server
can be killed at any time: programs and slices do not need it, and the next server continues from
the database. Without `--stay`, an idle server exits after a while.
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

from drumline.cloud import serving
from drumline.cloud.google.infra_health import InfraHealth
from drumline.cloud.google.rest import Dependencies
from drumline.cloud.google.tpu_api import GOOGLE, TpuApi
from drumline.cloud.idle_exit import SHUTDOWN_SECONDS, IdleExit
from drumline.errors import UserError
from drumline.hosts.ssh import MachineCloud, SshRunner, ensure_key_pair
from drumline.jobs.config import Config, ConfigError, read
from drumline.jobs.connection import home_folder
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.folders import Folders
from drumline.jobs.server import log_file
from drumline.jobs.server.api import JobsApi
from drumline.jobs.server.service import JobService
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.store.records import Store
from drumline.jobs.store.schema import SchemaError

log = logging.getLogger(__name__)
SOCKET_CHECK_SECONDS = 5.0


def connect(config: Config, dependencies: Dependencies | None = None) -> TpuApi:
    """Connect to the cloud of the settings. Start the emulator if it is not running."""
    if config.local:
        from drumline.cloud.local import emulated_cloud

        start_emulator(config)
        home = Path(config.endpoint) if config.endpoint else Folders(config.home).emulator
        return emulated_cloud(config.project, home, dependencies)
    from drumline.cloud.google.credentials import GoogleCredentials

    url = config.endpoint or GOOGLE
    return TpuApi(
        config.project, base_url=url, credentials=GoogleCredentials(), dependencies=dependencies
    )


def make_runner(config: Config, cloud: MachineCloud, public_key: str) -> SshRunner:
    """Return the runner of programs on the hosts of a cloud."""
    folders = Folders(config.home)
    return SshRunner(
        cloud,
        key=folders.key,
        public_key=public_key,
        known_hosts=folders.known_hosts,
        timing=config.timing,
    )


def health_source(config: Config) -> InfraHealth | None:
    """Return the external source of host health, if the settings name one for Google Cloud."""
    if config.health_source is None or config.local:
        return None
    from drumline.cloud.google.credentials import GoogleCredentials

    return InfraHealth(config.project, credentials=GoogleCredentials())


def start_emulator(config: Config) -> None:
    """Start this home's emulator if the settings use it and it is not running."""
    from drumline.cloud.emulator import launch

    if config.local and not config.endpoint:
        try:
            launch.ensure_running(Folders(config.home).emulator)
        except launch.EmulatorError as error:
            raise RequestError(f"the emulator does not start: {error}", 502) from None
        if warning := launch.version_warning(Folders(config.home).emulator):
            log.warning("%s", warning)


async def _socket_removed(path: Path) -> None:
    """Return when the socket was removed or replaced, because no caller can reach it then."""
    inode = path.stat().st_ino
    with contextlib.suppress(FileNotFoundError):
        while path.stat().st_ino == inode:
            await asyncio.sleep(SOCKET_CHECK_SECONDS)


def remove_socket(path: Path, inode: int) -> None:
    """Remove the socket of this server, but not that of a server that has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


async def serve(config: Config, stay: bool = False) -> None:
    """Serve until stopped. Without `stay`, also exit after the idle time of the settings."""
    folders = Folders(config.home)
    store = Store(folders.database)
    store.require_original(folders.home)
    store.record_cloud(config.cloud)
    public_key = ensure_key_pair(folders.key, store.held_slices())
    cloud = await asyncio.to_thread(connect, config)
    source = health_source(config)
    runner = make_runner(config, cloud, public_key)
    supervisor = Supervisor(store, cloud, config, runner, health_source=source)
    stop = asyncio.Event()
    service = JobService(supervisor)
    api = JobsApi(
        service,
        stop.set,
        lambda: idle_exit.seconds_left(),
        lambda: start_emulator(supervisor.config),
    )
    idle_seconds = None if stay else config.idle_seconds
    idle_exit = IdleExit(
        api.application(), supervisor.busy, idle_seconds, ignored_paths={"/status"}
    )
    folders.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folders.socket))
    folders.socket.chmod(0o600)
    inode = folders.socket.stat().st_ino
    web = uvicorn.Server(uvicorn.Config(idle_exit, log_level="warning", lifespan="off"))
    web.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    answering = asyncio.create_task(serving.serve(web, listener))
    supervising = asyncio.create_task(supervisor.run())
    stopping = asyncio.create_task(stop.wait())
    orphaned = asyncio.create_task(_socket_removed(folders.socket))
    idle = asyncio.create_task(idle_exit.wait_until_idle())
    try:
        tasks = {answering, supervising, stopping, orphaned, idle}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            log.info("exiting after %.0f min without work", config.idle_seconds / 60)
            remove_socket(folders.socket, inode)
            await asyncio.sleep(SHUTDOWN_SECONDS)
    finally:
        web.should_exit = True
        web.force_exit = True
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await answering
        stopping.cancel()
        orphaned.cancel()
        idle.cancel()
        await supervisor.close()
        store.close()
        remove_socket(folders.socket, inode)


def main() -> None:
    """Acquire the lock and serve. If a server is already running, exit without an error."""
    os.umask(0o077)
    home = home_folder()
    folders = Folders(home)
    log_file.configure(home / "server.log")
    with folders.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            asyncio.run(serve(read(home), stay="--stay" in sys.argv[1:]))
        except (ConfigError, SchemaError, UserError) as error:
            sys.exit(str(error))

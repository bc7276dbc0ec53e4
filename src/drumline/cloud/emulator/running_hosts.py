"""Starts and ends the hosts of nodes, as the fleet orders, and passes other orders on to them.

Each host is a process that is forked from a fork server with its code loaded. It communicates
through a pipe.
"""

import asyncio
import contextlib
import multiprocessing
import multiprocessing.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from drumline.cloud.emulator import processes
from drumline.cloud.emulator.host_messages import (
    ACKNOWLEDGED,
    PRELOADED_MODULES,
    Booted,
    HostSpec,
    Order,
    new_key,
    run_host,
)
from drumline.cloud.emulator.machines import MachineFolders
from drumline.cloud.model.resources import HostAddress, Node
from drumline.files import remove_tree

# A host ends in milliseconds. One that hangs is killed after this time.
_END_SECONDS = 40.0


@dataclass(frozen=True)
class HostSettings:
    """The folders and timing of the hosts."""

    home: Path
    """The emulator's home folder."""
    boot_seconds: float = 0.0

    @property
    def hosts(self) -> Path:
        """The disks: a folder for each node, with a folder for each host."""
        return self.home / "hosts"

    @property
    def buckets(self) -> Path:
        """The folder of the emulated Cloud Storage."""
        return self.home / "buckets"

    @property
    def tag(self) -> str:
        """The prefix of DRUMLINE_HOST_TAG on all hosts of this emulator."""
        return f"{self.home.resolve()}#"


@dataclass
class _RunningHost:
    """The process of a host, and the messages that it has sent."""

    process: ForkServerProcess
    pid: int
    pipe: Connection
    spec: HostSpec
    boots: int = 0
    """The number of boots so far."""
    sent: int = 0
    """The number of orders sent."""
    acknowledged: int = 0
    """The number of orders carried out."""
    booted: Booted | None = None
    closed: bool = False
    """True if no more messages will come."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listen(self) -> None:
        """Receive the host's messages from now on."""
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.stop_listening()
            return
        if isinstance(message, Booted):
            self.booted = message
            self.boots += 1
        elif message == ACKNOWLEDGED:
            self.acknowledged += 1
        self.changed.set()

    def stop_listening(self) -> None:
        """Stop receiving messages, and wake the waiting tasks."""
        if not self.closed:
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.closed = True
            self.changed.set()

    async def wait_for_boot(self, count: int) -> Booted | None:
        """Wait for the boot of this number. Return None if the host ends before."""
        await self._wait_until(lambda: self.boots >= count)
        return self.booted if self.boots >= count else None

    async def carry_out(self, order: Order) -> bool:
        """Send an order and wait until it is carried out. Return False if the host ends before."""
        self.sent += 1
        order_index = self.sent
        try:
            self.pipe.send(order)
        except OSError:
            return False
        await self._wait_until(lambda: self.acknowledged >= order_index)
        return self.acknowledged >= order_index

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.closed:
            self.changed.clear()
            await self.changed.wait()


class RunningHosts:
    """The hosts of all nodes."""

    def __init__(self, settings: HostSettings, machines: MachineFolders) -> None:
        """Start without hosts."""
        self._settings = settings
        self._machines = machines
        self._running: dict[int, list[_RunningHost]] = {}
        # In Python 3.11.0, any user of the machine can make the fork server run code
        # (CVE-2022-42919). A socket in a private folder prevents this.
        vars(multiprocessing.util)["abstract_sockets_supported"] = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED_MODULES)
        # Starting a process blocks for a moment, and multiprocessing needs a single thread for it.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hosts")
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: dict[int, asyncio.Lock] = {}
        self._keys: dict[int, dict[int, bytes]] = {}
        self._ending: set[int] = set()

    def remove_leftovers(self) -> None:
        """End the hosts of a previous emulator in this home, and remove their disks."""
        variable = f"DRUMLINE_HOST_TAG={self._settings.tag}"
        processes.kill_all(lambda: processes.find_by_environment(variable), timeout=5.0)
        remove_tree(self._settings.hosts)
        self._settings.hosts.mkdir(parents=True, mode=0o700)
        self._settings.buckets.mkdir(exist_ok=True)

    def start_fork_server(self) -> None:
        """Start the fork server, so that the first node does not wait for it."""
        self._starter.submit(multiprocessing.forkserver.ensure_running)  # type: ignore[attr-defined]

    def start(self, node: Node, report: Callable[[Node, tuple[HostAddress, ...]], None]) -> None:
        """Start a node's hosts and report them once all accept logins, or none if one failed."""

        async def work() -> None:
            async with self._lock(node):
                addresses = await self._start_all(node)
            report(node, addresses)

        self._spawn(work())

    def restart(self, node: Node, report: Callable[[Node, tuple[HostAddress, ...]], None]) -> None:
        """Reboot a node's hosts and report them once all accept logins, or none if one ended."""

        async def reboot(host: _RunningHost) -> Booted | None:
            count = host.boots + 1
            return await host.wait_for_boot(count) if await host.carry_out("reboot") else None

        async def work() -> None:
            async with self._lock(node):
                boots = await asyncio.gather(*map(reboot, self._running.get(node.uid, [])))
            report(node, _addresses(boots))

        self._spawn(work())

    def end(
        self, node: Node, report: Callable[[Node, bool], None], *, keep_disks: bool = False
    ) -> None:
        """End a node's hosts, delete their disks unless they are kept, and report it."""

        async def work() -> None:
            async with self._lock(node):
                await self._end_all(node.uid)
                self._ending.discard(node.uid)
                if not keep_disks:
                    await asyncio.to_thread(remove_tree, self._folder(node))
                    self._keys.pop(node.uid, None)
                    self._locks.pop(node.uid, None)
            report(node, keep_disks)

        # Hosts that are still starting are ended once they have started.
        self._ending.add(node.uid)
        self._send_all(node.uid, "end")
        self._spawn(work())

    async def order(self, node: Node, index: int, order: Order) -> bool:
        """Break or heal a host, and wait until it is done. Return False if the host has ended."""
        running = self._running.get(node.uid, [])
        return index < len(running) and await running[index].carry_out(order)

    async def give_notice(self, node: Node) -> None:
        """Announce a preemption: every host of a node sends SIGTERM to its programs."""
        await asyncio.gather(
            *(host.carry_out("notice") for host in self._running.get(node.uid, []))
        )

    def pids(self, node: Node) -> list[int]:
        """Return the process ids of a node's hosts."""
        return [host.pid for host in self._running.get(node.uid, [])]

    async def close(self) -> None:
        """End all hosts."""
        await asyncio.gather(*(self._end_all(uid) for uid in list(self._running)))
        remove_tree(self._settings.hosts)
        for task in self._tasks:
            task.cancel()
        self._starter.shutdown(wait=False)

    def _send_all(self, uid: int, message: str) -> None:
        for host in self._running.get(uid, []):
            with contextlib.suppress(OSError):
                host.pipe.send(message)

    def _lock(self, node: Node) -> asyncio.Lock:
        # A node may be deleted while its hosts are still starting.
        return self._locks.setdefault(node.uid, asyncio.Lock())

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_all(self, node: Node) -> tuple[HostAddress, ...]:
        loop = asyncio.get_running_loop()
        running = [
            await loop.run_in_executor(self._starter, self._fork, node, index)
            for index in range(node.spec.slice.hosts)
        ]
        self._running[node.uid] = running
        for host in running:
            host.listen()
        if node.uid in self._ending:
            self._send_all(node.uid, "end")
        for host in running:
            # The machine may have been broken before the host was registered.
            if (faults := self._machines.faults(host.spec.machine.name)) != host.spec.faults:
                await host.carry_out(faults)
        return _addresses(await asyncio.gather(*(host.wait_for_boot(1) for host in running)))

    def _folder(self, node: Node) -> Path:
        return self._settings.hosts / f"{node.spec.name.rpartition('/')[2]}-{node.uid:x}"

    def _fork(self, node: Node, index: int) -> _RunningHost:
        folder = self._folder(node) / str(index)
        keys = self._keys.setdefault(node.uid, {})
        spec = HostSpec(
            home=folder,
            # The host key belongs to the disk.
            host_key=keys.setdefault(index, new_key()),
            metadata=node.spec.metadata,
            chips=node.spec.slice.chips_per_host,
            emulator=self._settings.home,
            buckets=self._settings.buckets,
            boot_seconds=self._settings.boot_seconds,
            machine=self._machines.folder(node.machines[index]),
            faults=self._machines.faults(node.machines[index]),
            tag=f"{self._settings.tag}{node.uid:x}/{index}",
        )
        pipe, host_pipe = self._context.Pipe()
        name = f"host {folder.parent.name}/{index}"
        process = self._context.Process(target=run_host, args=(spec, host_pipe), name=name)
        process.start()
        host_pipe.close()
        return _RunningHost(process, process.pid or 0, pipe, spec)

    async def _end_all(self, uid: int) -> None:
        hosts_to_end = self._running.get(uid, [])
        self._send_all(uid, "end")
        await asyncio.gather(*(self._wait_for_end(host) for host in hosts_to_end))
        self._running.pop(uid, None)

    async def _wait_for_end(self, host: _RunningHost) -> None:
        if not await _wait_readable(host.process.sentinel, _END_SECONDS):
            host.process.kill()
            await _wait_readable(host.process.sentinel, _END_SECONDS)
        crashed = host.process.exitcode != 0
        host.stop_listening()
        host.pipe.close()
        host.process.close()
        if crashed:
            variable = f"DRUMLINE_HOST_TAG={host.spec.tag}"
            await asyncio.to_thread(
                processes.kill_all, lambda: processes.find_by_environment(variable)
            )


def _addresses(boots: Sequence[Booted | None]) -> tuple[HostAddress, ...]:
    """Return the addresses of all hosts of a node, or none if one host has ended."""
    addresses = [HostAddress("127.0.0.1", boot.port, boot.host_key) for boot in boots if boot]
    return tuple(addresses) if len(addresses) == len(boots) else ()


async def _wait_readable(fd: int, seconds: float | None) -> bool:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True

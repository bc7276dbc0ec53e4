"""Starts and ends the hosts of nodes, as the fleet orders, and passes `break` on to them.

Hosts are forked from a fork server that has their code loaded, one process each, and communicate
through a pipe. A host is gone when its process is.
"""

import asyncio
import contextlib
import multiprocessing
import multiprocessing.util
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from drumline.cloud.emulator import processes
from drumline.cloud.emulator.hosts.entry import PRELOADED, be_host
from drumline.cloud.emulator.hosts.terms import (
    ACKNOWLEDGED,
    HostSpec,
    Order,
    Up,
    new_key,
)
from drumline.cloud.emulator.machines import MachineFolders
from drumline.cloud.model.resources import HostAddress, Node

# A host ends in milliseconds; one that hangs is killed after this long.
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
        """The folder that stands in for Cloud Storage."""
        return self.home / "buckets"

    @property
    def mark(self) -> str:
        """The text in the environment of all processes on hosts of this emulator."""
        return f"{self.home.resolve()}#"


@dataclass
class _Running:
    process: ForkServerProcess
    pid: int
    pipe: Connection
    spec: HostSpec
    boots: int = 0
    """How often the host has booted."""
    sent: int = 0
    acknowledged: int = 0
    """How many orders the host has carried out."""
    up: Up | None = None
    closed: bool = False
    """Whether no more messages will come."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listen(self) -> None:
        """Receive its messages from now on."""
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.stop_listening()
            return
        if isinstance(message, Up):
            self.up = message
            self.boots += 1
        elif message == ACKNOWLEDGED:
            self.acknowledged += 1
        self.changed.set()

    def stop_listening(self) -> None:
        """Receive no more, and wake those who wait."""
        if not self.closed:
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.closed = True
            self.changed.set()

    async def booted(self, times: int) -> Up | None:
        """Wait until the host has booted so many times; None if it never will."""
        await self._until(lambda: self.boots >= times)
        return self.up if self.boots >= times else None

    async def do(self, what: Order) -> bool:
        """Send the host an order and wait until it is done; False if it never will be."""
        self.sent += 1
        order = self.sent
        try:
            self.pipe.send(what)
        except OSError:
            return False
        await self._until(lambda: self.acknowledged >= order)
        return self.acknowledged >= order

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self.closed:
            self.changed.clear()
            await self.changed.wait()


class Hosts:
    """The hosts of all nodes."""

    def __init__(self, settings: HostSettings, machines: MachineFolders) -> None:
        """No hosts yet."""
        self._settings = settings
        self._machines = machines
        self._running: dict[int, list[_Running]] = {}
        # In Python 3.11.0 the fork server would listen where every user of the machine could make
        # it run code (CVE-2022-42919); a socket in our own folder prevents that.
        vars(multiprocessing.util)["abstract_sockets_supported"] = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        # Starting a process blocks a little, and multiprocessing wants it done by one thread.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hosts")
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: dict[int, asyncio.Lock] = {}
        self._keys: dict[int, dict[int, bytes]] = {}
        self._ending: set[int] = set()

    def clear_away(self) -> None:
        """End and remove what an earlier emulator in this home left behind."""
        mark = f"DRUMLINE_HOST_TAG={self._settings.mark}"
        processes.end_all(lambda: processes.bearing(mark), deadline=5.0)
        shutil.rmtree(self._settings.hosts, ignore_errors=True)
        self._settings.hosts.mkdir(parents=True, mode=0o700)
        self._settings.buckets.mkdir(exist_ok=True)

    def warm_up(self) -> None:
        """Start the fork server now, so that the first node does not wait for it."""
        self._starter.submit(multiprocessing.forkserver.ensure_running)  # type: ignore[attr-defined]

    def start(self, node: Node, report: Callable[[Node, tuple[HostAddress, ...]], None]) -> None:
        """Start a node's hosts and report them when all accept logins; none if one failed."""

        async def work() -> None:
            async with self._lock(node):
                addresses = await self._start_all(node)
            report(node, addresses)

        self._spawn(work())

    def restart(self, node: Node, report: Callable[[Node, tuple[HostAddress, ...]], None]) -> None:
        """Reset a node's hosts and report them when all accept logins; none if one is gone."""

        async def reset(host: _Running) -> Up | None:
            boots = host.boots + 1
            return await host.booted(boots) if await host.do("reboot") else None

        async def work() -> None:
            async with self._lock(node):
                ups = await asyncio.gather(*map(reset, self._running.get(node.uid, [])))
            report(node, _addresses(ups))

        self._spawn(work())

    def end(
        self, node: Node, report: Callable[[Node, bool], None], *, keep_disks: bool = False
    ) -> None:
        """End a node's hosts and report when nothing is left of them, or only their disks."""

        async def work() -> None:
            async with self._lock(node):
                await self._end_all(node.uid)
                self._ending.discard(node.uid)
                if not keep_disks:
                    await asyncio.to_thread(shutil.rmtree, self._folder(node), ignore_errors=True)
                    self._keys.pop(node.uid, None)
                    self._locks.pop(node.uid, None)
            report(node, keep_disks)

        # Hosts that still boot are not waited for.
        self._ending.add(node.uid)
        self._send_all(node.uid, "end")
        self._spawn(work())

    async def order(self, node: Node, index: int, what: Order) -> bool:
        """Break or heal a host, and wait until that is done; False if the host is gone."""
        running = self._running.get(node.uid, [])
        return index < len(running) and await running[index].do(what)

    async def give_notice(self, node: Node) -> None:
        """Have every host of a node send SIGTERM to its programs."""
        await asyncio.gather(*(host.do("notice") for host in self._running.get(node.uid, [])))

    def listing(self, node: Node) -> list[int]:
        """The process of each of a node's hosts."""
        return [host.pid for host in self._running.get(node.uid, [])]

    async def close(self) -> None:
        """End all hosts."""
        await asyncio.gather(*(self._end_all(uid) for uid in list(self._running)))
        shutil.rmtree(self._settings.hosts, ignore_errors=True)
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
            # Its machine may have been broken while it was not yet listed as running.
            if (faults := self._machines.faults(host.spec.machine.name)) != host.spec.faults:
                await host.do(faults)
        return _addresses(await asyncio.gather(*(host.booted(1) for host in running)))

    def _folder(self, node: Node) -> Path:
        return self._settings.hosts / f"{node.spec.name.rpartition('/')[2]}-{node.uid:x}"

    def _fork(self, node: Node, index: int) -> _Running:
        folder = self._folder(node) / str(index)
        keys = self._keys.setdefault(node.uid, {})
        spec = HostSpec(
            home=folder,
            # A host has the same key as long as its disk exists.
            host_key=keys.setdefault(index, new_key()),
            metadata=node.spec.metadata,
            chips=node.spec.slice.chips_per_host,
            emulator=self._settings.home,
            buckets=self._settings.buckets,
            boot_seconds=self._settings.boot_seconds,
            machine=self._machines.folder(node.machines[index]),
            faults=self._machines.faults(node.machines[index]),
            mark=f"{self._settings.mark}{node.uid:x}/{index}",
        )
        ours, theirs = self._context.Pipe()
        name = f"host {folder.parent.name}/{index}"
        process = self._context.Process(target=be_host, args=(spec, theirs), name=name)
        process.start()
        theirs.close()
        return _Running(process, process.pid or 0, ours, spec)

    async def _end_all(self, uid: int) -> None:
        ending = self._running.get(uid, [])
        self._send_all(uid, "end")
        await asyncio.gather(*(self._ended(host) for host in ending))
        self._running.pop(uid, None)

    async def _ended(self, host: _Running) -> None:
        if not await _readable(host.process.sentinel, _END_SECONDS):
            host.process.kill()
            await _readable(host.process.sentinel, _END_SECONDS)
        crashed = host.process.exitcode != 0
        host.stop_listening()
        host.pipe.close()
        host.process.close()
        if crashed:
            mark = f"DRUMLINE_HOST_TAG={host.spec.mark}"
            await asyncio.to_thread(processes.end_all, lambda: processes.bearing(mark))


def _addresses(ups: Sequence[Up | None]) -> tuple[HostAddress, ...]:
    """The addresses of all hosts of a node; none if one does not answer."""
    found = [HostAddress("127.0.0.1", up.port, up.host_key) for up in ups if up]
    return tuple(found) if len(found) == len(ups) else ()


async def _readable(fd: int, seconds: float | None) -> bool:
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    loop.add_reader(fd, happened.set)
    try:
        await asyncio.wait_for(happened.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True

"""Simulated hosts: they respond like the agent, keep its state, and have faults."""

import asyncio
import base64
import json
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import asyncssh

from drumline.hosts.connection import ConnectionLost
from drumline.hosts.remote import AGENT_COMMAND
from drumline.hosts.values import Address, CompletedCommand, Timing
from tests.simulation.environment import Environment
from tests.simulation.programs import Running

BEAT = 550.0
"""Seconds between two lines of `watch` if nothing changes."""
LASTING = {"step", "stop"}
"""Commands that take time on a host. The others finish at once."""
OUTPUT = "results/output"
"""The one file that every program writes."""
NO_SPACE = "OSError: [Errno 28] No space left on device"


@dataclass
class HostRun:
    """One attempt in the state of a host's disk, and its program while it runs."""

    host: "Host"
    folder: str
    job: str = ""
    attempt: int = 0
    rank: int = 0
    ranks: int = 1
    checkpoint: str = ""
    owner: str = ""
    fence: int = 0
    stopped: bool = False
    started_at: float | None = None
    coordinator: str = ""
    burn_in: str = ""
    """The state of the burn-in; empty if there is none."""
    ending: dict[str, Any] | None = None
    heartbeat: dict[str, Any] | None = None
    alive: bool = False
    log: bytes = b""
    steps: set[str] = field(default_factory=set)

    def on_heartbeat(self, beat: dict[str, Any]) -> None:
        """Record a heartbeat that the program wrote."""
        self.heartbeat = beat
        self.host.notify()

    def on_end(self, code: int, error: str) -> None:
        """Record the end of the program."""
        if not self.alive:
            return
        self.alive = False
        self.host.environment.note("exit", self.job, self.attempt, self.host.name, code)
        if error:
            self.log += error.encode() + b"\n"
        error = "stopped" if self.stopped and code != 0 else error
        at = self.host.clock() if code else None
        self.ending = {
            "exit_code": code,
            "error": error,
            "error_at": at,
            "tail": [error] * (code != 0),
        }
        self.host.notify()

    def output(self) -> tuple[bytes, int]:
        """Return the content of the program's one output, and when it changed."""
        ended = self.ending is not None and not self.alive
        content = f"attempt {self.attempt}" + ("\nend\n" if ended else "\n")
        return content.encode(), (2 * self.attempt + ended) * 10**9

    def running(self) -> Running:
        """Return the program with all its ranks."""
        return self.host.environment.running[self.job, self.attempt]

    def status(self) -> dict[str, Any]:
        """Return the status in the format of the agent."""
        status: dict[str, Any] = {
            "state": "none",
            "stopped": self.stopped,
            "going_down": self.host.going_down,
            "heartbeat": self.heartbeat,
            "log_size": len(self.log),
        }
        if self.started_at is None:
            return status
        status |= {
            "state": "running",
            "started_at": self.started_at,
            "coordinator": self.coordinator,
        }
        if self.burn_in:
            status["burnin"] = {"verdict": self.burn_in, "seconds": 30.0}
        if self.ending is not None:
            status |= {**self.ending, "state": "exited"}
        elif not self.alive:
            status["state"] = "lost"
        return status


class Host:
    """One host of a slice."""

    def __init__(
        self,
        environment: Environment,
        name: str,
        address: Address,
        skew: float,
        machines: Sequence[str],
    ) -> None:
        """Boot a host. It does not respond before `up`. `machines` are those of its whole slice."""
        self.environment, self.name, self.address = environment, name, address
        self._machines = machines
        self._skew = skew
        self.up = False
        self.hung_until = 0.0
        self.mute_until = 0.0
        self.full_until = 0.0
        self.going_down = ""
        self.contacted = False
        """True if a server has ever connected to the host."""
        self.installed = False
        self.attempts: dict[str, HostRun] = {}
        self._changed = asyncio.Event()
        self._lines_cut = 0

    def clock(self) -> float:
        """Return the time of the host's own clock."""
        return self.environment.now() + self._skew

    def notify(self) -> None:
        """Wake up every `watch` of this host."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Faults --------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Close every connection to the host."""
        self._lines_cut += 1
        self.notify()

    def end(self) -> None:
        """Remove the host with its programs and its disk."""
        self.up = False
        self._kill_programs()
        self.environment.hosts.pop(self.address.ssh_ip, None)
        self.cut()

    def record_fault(self) -> None:
        """Record that a verdict against this host would be correct."""
        self.environment.host_faults[self.name.rpartition("/")[0]] += 1

    def hang(self, seconds: float) -> None:
        """Stop responding for a while. The programs continue."""
        self.record_fault()
        self.hung_until = max(self.hung_until, self.environment.now() + seconds)

    def mute(self, seconds: float) -> None:
        """Execute commands, but send no responses for a while."""
        self.record_fault()
        self.mute_until = max(self.mute_until, self.environment.now() + seconds)
        self.cut()

    def lie(self, code: int) -> None:
        """Report a program as ended while it still runs."""
        for host_run in self.attempts.values():
            if host_run.alive and host_run.ending is None:
                self.record_fault()
                self.environment.note("lie", host_run.job, host_run.attempt, self.name, code)
                self.environment.misreported_runs.add((host_run.job, host_run.attempt))
                host_run.ending = {"exit_code": code, "error": "", "error_at": None, "tail": []}
        self.notify()

    def reboot(self, seconds: float) -> None:
        """Reboot the host. It keeps its disk, and its programs are lost."""
        self.record_fault()
        self.up = False
        self._kill_programs()
        self.cut()
        self.environment.spawn(self._finish_reboot(seconds))

    async def _finish_reboot(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.address.ssh_ip in self.environment.hosts:
            self.up = True

    def _kill_programs(self, but: HostRun | None = None) -> None:
        for host_run in self.attempts.values():
            if host_run.alive and host_run is not but:
                host_run.alive = False
                self.environment.note("killed", host_run.job, host_run.attempt, self.name)
                host_run.running().gone(host_run.rank)

    def announce_shutdown(self, reason: str) -> None:
        """Announce a preemption to the host, which ends its programs first."""
        self.going_down = reason
        for host_run in self.attempts.values():
            if host_run.alive:
                self._terminate(host_run)
        self.notify()

    def _terminate(self, host_run: HostRun) -> None:
        if host_run.burn_in == "running":
            host_run.on_end(-15, "")
            return
        seconds = host_run.running().seconds_to_end()
        if seconds is not None:
            self.environment.spawn(self._end_after(host_run, seconds))

    async def _end_after(self, host_run: HostRun, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if host_run.alive:
            host_run.running().ends_after_sigterm(host_run.rank)

    # Commands of the agent -----------------------------------------------------------------------

    async def do(self, arguments: list[str], sent: bytes) -> tuple[int, str, str]:
        """Run one command of the agent. Return exit code, output and error."""
        verb = arguments[0]
        if self.environment.now() < self.full_until and verb in {
            "prepare",
            "receive",
            "unpack",
            "step",
        }:
            self.record_fault()
            return 1, "", NO_SPACE
        if verb == "free-port":
            return 0, json.dumps({"port": 8476}), ""
        if verb == "receive":
            return 0, "{}", ""
        if verb == "unpack":
            return 0, json.dumps({"have_code": True}), ""
        host_run = self.attempts.setdefault(arguments[1], HostRun(self, arguments[1]))
        match verb:
            case "status":
                return 0, json.dumps(host_run.status()), ""
            case "prepare":
                return 0, json.dumps(self._prepare(host_run, sent)), ""
            case "step":
                step = json.loads(sent)
                await asyncio.sleep(self.environment.streams["hosts"].delay(10.0))
                if host_run.stopped:
                    return 0, json.dumps({"exit_code": -15, "error": "stopped"}), ""
                host_run.steps.add(step["name"])
                return 0, json.dumps({"exit_code": 0}), ""
            case "start":
                return 0, json.dumps(self._start(host_run, json.loads(sent))), ""
            case "list-outputs":
                content, changed_ns = host_run.output()
                return 0, json.dumps({"files": [[OUTPUT, len(content), changed_ns]]}), ""
            case "stop":
                await self._stop(host_run, float(arguments[2]))
                return 0, json.dumps(host_run.status()), ""
        return 2, "", f"{verb} is nothing the agent does"

    def _prepare(self, host_run: HostRun, sent: bytes) -> dict[str, Any]:
        program = json.loads(sent)["program"]
        variables = program["variables"]
        host_run.owner, host_run.fence = (
            variables["DRUMLINE_OWNER"],
            int(variables["DRUMLINE_FENCE"]),
        )
        host_run.checkpoint = program["checkpoint"] or ""
        host_run.job = self.environment.key(host_run.owner, variables["DRUMLINE_JOB_ID"])
        host_run.attempt = int(variables["DRUMLINE_ATTEMPT"])
        host_run.rank, host_run.ranks = (
            int(variables["DRUMLINE_HOST"]),
            int(variables["DRUMLINE_HOSTS"]),
        )
        self._kill_programs(but=host_run)  # Free the chips.
        machine = self._machines[int(self.name.rpartition("/")[2])]
        return {"have_code": True, "identity": {"physical_host": machine}}

    def _start(self, host_run: HostRun, sent: Mapping[str, str]) -> dict[str, Any]:
        if host_run.started_at is None and not host_run.stopped:
            environment = self.environment
            host_run.started_at, host_run.alive = self.clock(), True
            host_run.coordinator = sent["coordinator"]
            host_run.log += b"step 0\n"
            run = (host_run.job, host_run.attempt, self.name)
            environment.started[run] = environment.started.get(run, 0) + 1
            environment.note("start", *run)
            for check in environment.start_checks:
                check(*run)
            key = (host_run.job, host_run.attempt)
            if key not in environment.running:
                environment.running[key] = Running(
                    environment, *key, host_run.ranks, environment.plans[host_run.job],
                    host_run.checkpoint, host_run.owner, host_run.fence,
                )  # fmt: skip
            if sent.get("before"):
                host_run.burn_in = "running"
                environment.spawn(self._burn_in(host_run))
            else:
                host_run.running().join(host_run.rank, host_run)
            self.notify()
        return host_run.status()

    async def _burn_in(self, host_run: HostRun) -> None:
        """Run the burn-in. All hosts report the same bad machine, or start the program."""
        await asyncio.sleep(self.environment.streams["hosts"].delay(60.0))
        if not host_run.alive or not self.up:
            return
        bad = [index for index, name in enumerate(self._machines) if self.environment.is_bad(name)]
        if bad:
            self.record_fault()
            host_run.on_end(86, f"drumline: chip 0 of host {bad[0]} computes wrong: a checksum")
            return
        host_run.burn_in = "pass"
        host_run.running().join(host_run.rank, host_run)
        self.notify()

    async def _stop(self, host_run: HostRun, grace: float) -> None:
        host_run.stopped = True
        if host_run.alive:
            self._terminate(host_run)
        deadline = self.environment.now() + grace
        while host_run.alive and self.environment.now() < deadline:
            await asyncio.sleep(min(1.0, max(0.01, deadline - self.environment.now())))
        if host_run.alive:
            host_run.running().rank_died(host_run.rank, -9)
        self.notify()

    async def watch(self, folder: str, offset: int) -> AsyncIterator[bytes]:
        """Yield the log from an offset and each new status, until the connection is cut."""
        cut = self._lines_cut
        host_run = self.attempts.setdefault(folder, HostRun(self, folder))
        last_status: dict[str, Any] | None = None
        while True:
            changed = self._changed
            status = host_run.status()
            if len(host_run.log) > offset:
                piece = base64.b64encode(host_run.log[offset:]).decode()
                yield json.dumps({"log": piece, "offset": offset, "at": self.clock()}).encode()
                offset = len(host_run.log)
            if status != last_status:
                last_status = status
                yield json.dumps({"status": status}).encode()
            try:
                async with asyncio.timeout(BEAT):
                    await changed.wait()
            except TimeoutError:
                yield b"{}"
            while self.environment.now() < self.hung_until:
                await asyncio.sleep(max(0.01, self.hung_until - self.environment.now()))
            if self._lines_cut != cut or self.environment.now() < self.mute_until:
                raise ConnectionLost("connection lost")


class SimulatedConnection:
    """The simulated counterpart of `hosts.connection.Connection`: the same methods, to a simulated
    host.
    """

    environment: Environment
    """Set by `isolate`."""

    def __init__(self, host: Host) -> None:
        """Take a host that accepted the connection."""
        self._host = host
        self._cut = host._lines_cut
        self._stream = host.environment.streams["connections"]

    @classmethod
    async def open(cls, address: Address, key: Path, known: Any, timing: Timing) -> Self:
        """Connect. Raises the errors of SSH."""
        del key
        environment = cls.environment
        stream = environment.streams["connections"]
        await asyncio.sleep(stream.delay(0.3, 5.0))
        host = environment.hosts.get(address.ssh_ip)
        if host is None or environment.now() < host.hung_until:
            await asyncio.sleep(timing.connect_timeout)
            raise TimeoutError
        if not host.up:
            raise ConnectionRefusedError
        known.pin(address, f"ssh-ed25519 {address.ssh_ip}")
        host.contacted = True
        return cls(host)

    async def run(
        self,
        command: str,
        input_bytes: bytes = b"",
        input_file: Path | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> CompletedCommand:
        """Run a command to its end."""
        del on_sent
        host, environment = self._host, self._host.environment
        await self._pass_through()
        lossy = not environment.quiet and self._stream.bernoulli(0.01)
        if lossy and self._stream.bernoulli(0.5):
            raise asyncssh.ConnectionLost("connection lost")
        if input_file is not None:
            input_bytes = input_file.name.encode()
        if command.startswith("test -f"):
            return CompletedCommand(0 if host.installed else 1, "", "")
        if not command.startswith(AGENT_COMMAND):
            host.installed = True
            return CompletedCommand(0, "", "")
        arguments = _words(command)
        if arguments[0] in LASTING:
            # The command continues on the host even if the connection to it is cut.
            task = environment.spawn(host.do(arguments, input_bytes))
            while not task.done():
                await asyncio.wait({task}, timeout=5.0)
                await self._pass_through()
            code, output, error = task.result()
        else:
            code, output, error = await host.do(arguments, input_bytes)
            await self._pass_through()
        if lossy or environment.now() < host.mute_until:
            raise asyncssh.ConnectionLost("connection lost")
        if not environment.quiet and self._stream.bernoulli(0.003):
            host.record_fault()
            output = '{"state": 7'
        return CompletedCommand(code, output, error)

    async def _pass_through(self) -> None:
        """Simulate the network between server and host.

        Raises `ConnectionLost` if there is no path.
        """
        await asyncio.sleep(self._stream.delay(0.05))
        host = self._host
        if host.environment.now() < host.hung_until:
            await asyncio.sleep(6.0)
            raise asyncssh.ConnectionLost("no answer to keepalives")
        if host._lines_cut != self._cut or not host.up:
            raise asyncssh.ConnectionLost("connection lost")

    async def lines(self, command: str, input_bytes: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the lines of a long-lived command."""
        arguments = _words(command)
        await self._pass_through()
        if arguments[0] == "send-outputs":
            [[_, size]] = json.loads(input_bytes)["files"]
            content, _ = self._host.attempts[arguments[1]].output()
            yield json.dumps({"data": base64.b64encode(content[:size]).decode()}).encode()
            await self._pass_through()
            yield b'{"done": true}'
            return
        async for line in self._host.watch(arguments[1], int(arguments[2])):
            yield line
            await self._pass_through()

    def abort(self) -> None:
        """Do nothing: a simulated connection holds nothing open."""

    async def close(self) -> None:
        """Do nothing: a simulated connection holds nothing open."""


def _words(command: str) -> list[str]:
    """Split the arguments of an agent command."""
    arguments = command[len(AGENT_COMMAND) :]
    return shlex.split(arguments) if "'" in arguments else arguments.split()

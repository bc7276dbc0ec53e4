"""Hosts that answer as the agent does: what it says, what it remembers, and how it may go wrong."""

import asyncio
import base64
import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
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
"""Seconds between two lines of `watch` where nothing happens."""
LASTING = {"step", "stop"}
"""What takes time on a host; the rest is done at once."""
NO_SPACE = "OSError: [Errno 28] No space left on device"


@dataclass
class HostRun:
    """One attempt as the host's disk remembers it, and its program while it lives."""

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
    """How its burn-in went, as far as it has come; empty where there is none."""
    ending: dict[str, Any] | None = None
    heartbeat: dict[str, Any] | None = None
    alive: bool = False
    log: bytes = b""
    steps: set[str] = field(default_factory=set)

    def told(self, beat: dict[str, Any]) -> None:
        """The program wrote a heartbeat."""
        self.heartbeat = beat
        self.host.stir()

    def ended(self, code: int, error: str) -> None:
        """The program ended."""
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
        self.host.stir()

    def running(self) -> Running:
        """The program, all ranks."""
        return self.host.environment.running[self.job, self.attempt]

    def status(self) -> dict[str, Any]:
        """As the agent tells it."""
        known: dict[str, Any] = {
            "state": "none",
            "stopped": self.stopped,
            "going_down": self.host.going_down,
            "heartbeat": self.heartbeat,
            "log_size": len(self.log),
        }
        if self.started_at is None:
            return known
        known |= {
            "state": "running",
            "started_at": self.started_at,
            "coordinator": self.coordinator,
        }
        if self.burn_in:
            known["burnin"] = {"verdict": self.burn_in, "seconds": 30.0}
        if self.ending is not None:
            known |= {**self.ending, "state": "exited"}
        elif not self.alive:
            known["state"] = "lost"
        return known


class Host:
    """One machine of a slice."""

    def __init__(
        self,
        environment: Environment,
        name: str,
        address: Address,
        skew: float,
        machines: Sequence[str],
    ) -> None:
        """It boots, and does not answer before `up`; `machines` are those under its whole slice."""
        self.environment, self.name, self.address = environment, name, address
        self._machines = machines
        self._skew = skew
        self.up = False
        self.hung_until = 0.0
        self.mute_until = 0.0
        self.full_until = 0.0
        self.going_down = ""
        self.installed = False
        self.attempts: dict[str, HostRun] = {}
        self._changed = asyncio.Event()
        self._lines_cut = 0

    def clock(self) -> float:
        """What the host takes for the time."""
        return self.environment.now() + self._skew

    def stir(self) -> None:
        """Whoever watches has something to read."""
        self._changed.set()
        self._changed = asyncio.Event()

    # What happens to it --------------------------------------------------------------------------

    def cut(self) -> None:
        """Every connection to it ends."""
        self._lines_cut += 1
        self.stir()

    def end(self) -> None:
        """It is gone: programs, disk and all."""
        self.up = False
        self._kill_programs()
        self.environment.hosts.pop(self.address.ssh_ip, None)
        self.cut()

    def misbehaves(self) -> None:
        """Note that a verdict against it would be just."""
        self.environment.host_faults[self.name.rpartition("/")[0]] += 1

    def hang(self, seconds: float) -> None:
        """It answers nothing for a while; what it runs goes on."""
        self.misbehaves()
        self.hung_until = self.environment.now() + seconds

    def mute(self, seconds: float) -> None:
        """It hears and does what it is told, and no answer comes back."""
        self.misbehaves()
        self.mute_until = self.environment.now() + seconds
        self.cut()

    def lie(self, code: int) -> None:
        """It gives its program out as ended, while that runs on."""
        for host_run in self.attempts.values():
            if host_run.alive and host_run.ending is None:
                self.misbehaves()
                self.environment.note("lie", host_run.job, host_run.attempt, self.name, code)
                self.environment.liars.add((host_run.job, host_run.attempt))
                host_run.ending = {"exit_code": code, "error": "", "error_at": None, "tail": []}
        self.stir()

    def reboot(self, seconds: float) -> None:
        """It goes down and comes back with its disk and without its programs."""
        self.misbehaves()
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

    def announce_shutdown(self, why: str) -> None:
        """It is told that it will be taken, and ends its programs first."""
        self.going_down = why
        for host_run in self.attempts.values():
            if host_run.alive:
                self._terminate(host_run)
        self.stir()

    def _terminate(self, host_run: HostRun) -> None:
        if host_run.burn_in == "running":
            host_run.ended(-15, "")
            return
        seconds = host_run.running().seconds_to_end()
        if seconds is not None:
            self.environment.spawn(self._ends(host_run, seconds))

    async def _ends(self, host_run: HostRun, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if host_run.alive:
            host_run.running().ends_after_sigterm(host_run.rank)

    # What it is asked ----------------------------------------------------------------------------

    async def do(self, arguments: list[str], sent: bytes) -> tuple[int, str, str]:
        """One verb of the agent: exit code, what it says, and its complaint."""
        verb = arguments[0]
        if self.environment.now() < self.full_until and verb in {
            "prepare",
            "receive",
            "unpack",
            "step",
        }:
            self.misbehaves()
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
        self._kill_programs(but=host_run)  # whatever holds the chips
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
            for check in environment.starting:
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
            self.stir()
        return host_run.status()

    async def _burn_in(self, host_run: HostRun) -> None:
        """What comes before the program: all hosts find the same bad machine, or begin it."""
        await asyncio.sleep(self.environment.streams["hosts"].delay(60.0))
        if not host_run.alive or not self.up:
            return
        bad = [place for place, name in enumerate(self._machines) if self.environment.is_bad(name)]
        if bad:
            self.misbehaves()
            host_run.ended(86, f"drumline: chip 0 of host {bad[0]} computes wrong: a checksum")
            return
        host_run.burn_in = "pass"
        host_run.running().join(host_run.rank, host_run)
        self.stir()

    async def _stop(self, host_run: HostRun, grace: float) -> None:
        host_run.stopped = True
        if host_run.alive:
            self._terminate(host_run)
        deadline = self.environment.now() + grace
        while host_run.alive and self.environment.now() < deadline:
            await asyncio.sleep(min(1.0, max(0.01, deadline - self.environment.now())))
        if host_run.alive:
            host_run.running().rank_died(host_run.rank, -9)
        self.stir()

    async def watch(self, folder: str, offset: int) -> AsyncIterator[bytes]:
        """The log from an offset, and the status at each change, until the line is cut."""
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
    """Stands for `hosts.connection.Connection`: the same calls, to a simulated host."""

    environment: Environment
    """Set by whoever runs the simulation."""

    def __init__(self, host: Host) -> None:
        """Connected."""
        self._host = host
        self._cut = host._lines_cut
        self._dice = host.environment.streams["connections"]

    @classmethod
    async def open(cls, address: Address, key: Path, known: Any, timing: Timing) -> Self:
        """Connect; raises as SSH does."""
        del key, known
        environment = cls.environment
        stream = environment.streams["connections"]
        await asyncio.sleep(stream.delay(0.3, 5.0))
        host = environment.hosts.get(address.ssh_ip)
        if host is None or environment.now() < host.hung_until:
            await asyncio.sleep(timing.connect_timeout)
            raise TimeoutError
        if not host.up:
            raise ConnectionRefusedError
        return cls(host)

    async def run(
        self, command: str, input_bytes: bytes = b"", input_file: Path | None = None
    ) -> CompletedCommand:
        """Run a command to its end."""
        host, environment = self._host, self._host.environment
        await self._pass_through()
        lossy = not environment.quiet and self._dice.chance(0.01)
        if lossy and self._dice.chance(0.5):
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
            # What runs on the host does not depend on us; we may be cut off from its answer.
            doing = environment.spawn(host.do(arguments, input_bytes))
            while not doing.done():
                await asyncio.wait({doing}, timeout=5.0)
                await self._pass_through()
            code, output, complaint = doing.result()
        else:
            code, output, complaint = await host.do(arguments, input_bytes)
            await self._pass_through()
        if lossy or environment.now() < host.mute_until:
            raise asyncssh.ConnectionLost("connection lost")
        if not environment.quiet and self._dice.chance(0.003):
            host.misbehaves()
            output = '{"state": 7'
        return CompletedCommand(code, output, complaint)

    async def _pass_through(self) -> None:
        """The way to the host and back, if there is one."""
        await asyncio.sleep(self._dice.delay(0.05))
        host = self._host
        if host.environment.now() < host.hung_until:
            await asyncio.sleep(6.0)
            raise asyncssh.ConnectionLost("no answer to keepalives")
        if host._lines_cut != self._cut or not host.up:
            raise asyncssh.ConnectionLost("connection lost")

    async def lines(self, command: str) -> AsyncIterator[bytes]:
        """What a long-lived command says, line by line."""
        arguments = _words(command)
        await self._pass_through()
        async for line in self._host.watch(arguments[1], int(arguments[2])):
            yield line
            await self._pass_through()

    def abort(self) -> None:
        """Let go without a word."""

    async def close(self) -> None:
        """Let go."""


def _words(command: str) -> list[str]:
    """What the agent is called with."""
    arguments = command[len(AGENT_COMMAND) :]
    return shlex.split(arguments) if "'" in arguments else arguments.split()

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
from tests.simulation.nature import Nature
from tests.simulation.programs import Running

BEAT = 550.0
"""Seconds between two lines of `watch` where nothing happens."""
LASTING = {"step", "stop"}
"""What takes time on a host; the rest is done at once."""
NO_SPACE = "OSError: [Errno 28] No space left on device"


@dataclass
class OnHost:
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
    examined: str = ""
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
        self.host.nature.note("exit", self.job, self.attempt, self.host.name, code)
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
        return self.host.nature.running[self.job, self.attempt]

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
        if self.examined:
            known["burnin"] = {"verdict": self.examined, "seconds": 30.0}
        if self.ending is not None:
            known |= {**self.ending, "state": "exited"}
        elif not self.alive:
            known["state"] = "lost"
        return known


class Host:
    """One machine of a slice."""

    def __init__(
        self, nature: Nature, name: str, address: Address, skew: float, machines: Sequence[str]
    ) -> None:
        """It boots, and does not answer before `up`; `machines` are those under its whole slice."""
        self.nature, self.name, self.address = nature, name, address
        self._machines = machines
        self._skew = skew
        self.up = False
        self.hung_until = 0.0
        self.mute_until = 0.0
        self.full_until = 0.0
        self.going_down = ""
        self.installed = False
        self.attempts: dict[str, OnHost] = {}
        self._changed = asyncio.Event()
        self._lines_cut = 0

    def clock(self) -> float:
        """What the host takes for the time."""
        return self.nature.now() + self._skew

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
        self.nature.hosts.pop(self.address.ssh_ip, None)
        self.cut()

    def misbehaves(self) -> None:
        """Note that a verdict against it would be just."""
        self.nature.host_faults[self.name.rpartition("/")[0]] += 1

    def hang(self, seconds: float) -> None:
        """It answers nothing for a while; what it runs goes on."""
        self.misbehaves()
        self.hung_until = self.nature.now() + seconds

    def mute(self, seconds: float) -> None:
        """It hears and does what it is told, and no answer comes back."""
        self.misbehaves()
        self.mute_until = self.nature.now() + seconds
        self.cut()

    def lie(self, code: int) -> None:
        """It gives its program out as ended, while that runs on."""
        for kept in self.attempts.values():
            if kept.alive and kept.ending is None:
                self.misbehaves()
                self.nature.note("lie", kept.job, kept.attempt, self.name, code)
                self.nature.liars.add((kept.job, kept.attempt))
                kept.ending = {"exit_code": code, "error": "", "error_at": None, "tail": []}
        self.stir()

    def reboot(self, seconds: float) -> None:
        """It goes down and comes back with its disk and without its programs."""
        self.misbehaves()
        self.up = False
        self._kill_programs()
        self.cut()
        self.nature.spawn(self._comes_back(seconds))

    async def _comes_back(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.address.ssh_ip in self.nature.hosts:
            self.up = True

    def _kill_programs(self, but: OnHost | None = None) -> None:
        for kept in self.attempts.values():
            if kept.alive and kept is not but:
                kept.alive = False
                self.nature.note("killed", kept.job, kept.attempt, self.name)
                kept.running().gone(kept.rank)

    def notice(self, why: str) -> None:
        """It is told that it will be taken, and ends its programs first."""
        self.going_down = why
        for kept in self.attempts.values():
            if kept.alive:
                self._terminate(kept)
        self.stir()

    def _terminate(self, kept: OnHost) -> None:
        if kept.examined == "running":
            kept.ended(-15, "")
            return
        seconds = kept.running().seconds_to_end()
        if seconds is not None:
            self.nature.spawn(self._ends(kept, seconds))

    async def _ends(self, kept: OnHost, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if kept.alive:
            kept.running().ends_after_sigterm(kept.rank)

    # What it is asked ----------------------------------------------------------------------------

    async def do(self, words: list[str], sent: bytes) -> tuple[int, str, str]:
        """One verb of the agent: exit code, what it says, and its complaint."""
        verb = words[0]
        if self.nature.now() < self.full_until and verb in {"prepare", "receive", "unpack", "step"}:
            self.misbehaves()
            return 1, "", NO_SPACE
        if verb == "free-port":
            return 0, json.dumps({"port": 8476}), ""
        if verb == "receive":
            return 0, "{}", ""
        if verb == "unpack":
            return 0, json.dumps({"have_code": True}), ""
        kept = self.attempts.setdefault(words[1], OnHost(self, words[1]))
        match verb:
            case "status":
                return 0, json.dumps(kept.status()), ""
            case "prepare":
                return 0, json.dumps(self._prepare(kept, sent)), ""
            case "step":
                wanted = json.loads(sent)
                await asyncio.sleep(self.nature.streams["hosts"].delay(10.0))
                if kept.stopped:
                    return 0, json.dumps({"exit_code": -15, "error": "stopped"}), ""
                kept.steps.add(wanted["name"])
                return 0, json.dumps({"exit_code": 0}), ""
            case "start":
                return 0, json.dumps(self._start(kept, json.loads(sent))), ""
            case "stop":
                await self._stop(kept, float(words[2]))
                return 0, json.dumps(kept.status()), ""
        return 2, "", f"{verb} is nothing the agent does"

    def _prepare(self, kept: OnHost, sent: bytes) -> dict[str, Any]:
        program = json.loads(sent)["program"]
        variables = program["variables"]
        kept.owner, kept.fence = variables["DRUMLINE_OWNER"], int(variables["DRUMLINE_FENCE"])
        kept.checkpoint = program["checkpoint"] or ""
        kept.job = self.nature.key(kept.owner, variables["DRUMLINE_JOB_ID"])
        kept.attempt = int(variables["DRUMLINE_ATTEMPT"])
        kept.rank, kept.ranks = int(variables["DRUMLINE_HOST"]), int(variables["DRUMLINE_HOSTS"])
        self._kill_programs(but=kept)  # whatever holds the chips
        machine = self._machines[int(self.name.rpartition("/")[2])]
        return {"have_code": True, "identity": {"physical_host": machine}}

    def _start(self, kept: OnHost, sent: Mapping[str, str]) -> dict[str, Any]:
        if kept.started_at is None and not kept.stopped:
            nature = self.nature
            kept.started_at, kept.alive = self.clock(), True
            kept.coordinator = sent["coordinator"]
            kept.log += b"step 0\n"
            run = (kept.job, kept.attempt, self.name)
            nature.started[run] = nature.started.get(run, 0) + 1
            nature.note("start", *run)
            for check in nature.starting:
                check(*run)
            key = (kept.job, kept.attempt)
            if key not in nature.running:
                nature.running[key] = Running(
                    nature, *key, kept.ranks, nature.plans[kept.job],
                    kept.checkpoint, kept.owner, kept.fence,
                )  # fmt: skip
            if sent.get("before"):
                kept.examined = "running"
                nature.spawn(self._burn_in(kept))
            else:
                kept.running().join(kept.rank, kept)
            self.stir()
        return kept.status()

    async def _burn_in(self, kept: OnHost) -> None:
        """What comes before the program: all hosts find the same bad machine, or begin it."""
        await asyncio.sleep(self.nature.streams["hosts"].delay(60.0))
        if not kept.alive or not self.up:
            return
        bad = [place for place, name in enumerate(self._machines) if self.nature.is_bad(name)]
        if bad:
            self.misbehaves()
            kept.ended(86, f"drumline: chip 0 of host {bad[0]} computes wrong: a checksum")
            return
        kept.examined = "pass"
        kept.running().join(kept.rank, kept)
        self.stir()

    async def _stop(self, kept: OnHost, grace: float) -> None:
        kept.stopped = True
        if kept.alive:
            self._terminate(kept)
        deadline = self.nature.now() + grace
        while kept.alive and self.nature.now() < deadline:
            await asyncio.sleep(min(1.0, max(0.01, deadline - self.nature.now())))
        if kept.alive:
            kept.running().rank_died(kept.rank, -9)
        self.stir()

    async def watch(self, folder: str, offset: int) -> AsyncIterator[bytes]:
        """The log from an offset, and the status at each change, until the line is cut."""
        cut = self._lines_cut
        kept = self.attempts.setdefault(folder, OnHost(self, folder))
        said: dict[str, Any] | None = None
        while True:
            changed = self._changed
            status = kept.status()
            if len(kept.log) > offset:
                piece = base64.b64encode(kept.log[offset:]).decode()
                yield json.dumps({"log": piece, "offset": offset, "at": self.clock()}).encode()
                offset = len(kept.log)
            if status != said:
                said = status
                yield json.dumps({"status": status}).encode()
            try:
                async with asyncio.timeout(BEAT):
                    await changed.wait()
            except TimeoutError:
                yield b"{}"
            while self.nature.now() < self.hung_until:
                await asyncio.sleep(max(0.01, self.hung_until - self.nature.now()))
            if self._lines_cut != cut or self.nature.now() < self.mute_until:
                raise ConnectionLost("connection lost")


class SimulatedConnection:
    """Stands for `hosts.connection.Connection`: the same calls, to a simulated host."""

    nature: Nature
    """Set by whoever runs the simulation."""

    def __init__(self, host: Host) -> None:
        """Connected."""
        self._host = host
        self._cut = host._lines_cut
        self._dice = host.nature.streams["connections"]

    @classmethod
    async def open(cls, address: Address, key: Path, known: Any, timing: Timing) -> Self:
        """Connect; raises as SSH does."""
        del key, known
        nature = cls.nature
        dice = nature.streams["connections"]
        await asyncio.sleep(dice.delay(0.3, 5.0))
        host = nature.hosts.get(address.ssh_ip)
        if host is None or nature.now() < host.hung_until:
            await asyncio.sleep(timing.connect_timeout)
            raise TimeoutError
        if not host.up:
            raise ConnectionRefusedError
        return cls(host)

    async def run(
        self, command: str, input_bytes: bytes = b"", input_file: Path | None = None
    ) -> CompletedCommand:
        """Run a command to its end."""
        host, nature = self._host, self._host.nature
        await self._pass_through()
        lossy = not nature.quiet and self._dice.chance(0.01)
        if lossy and self._dice.chance(0.5):
            raise asyncssh.ConnectionLost("connection lost")
        if input_file is not None:
            input_bytes = input_file.name.encode()
        if command.startswith("test -f"):
            return CompletedCommand(0 if host.installed else 1, "", "")
        if not command.startswith(AGENT_COMMAND):
            host.installed = True
            return CompletedCommand(0, "", "")
        words = _words(command)
        if words[0] in LASTING:
            # What runs on the host does not depend on us; we may be cut off from its answer.
            doing = nature.spawn(host.do(words, input_bytes))
            while not doing.done():
                await asyncio.wait({doing}, timeout=5.0)
                await self._pass_through()
            code, said, complaint = doing.result()
        else:
            code, said, complaint = await host.do(words, input_bytes)
            await self._pass_through()
        if lossy or nature.now() < host.mute_until:
            raise asyncssh.ConnectionLost("connection lost")
        if not nature.quiet and self._dice.chance(0.003):
            host.misbehaves()
            said = '{"state": 7'
        return CompletedCommand(code, said, complaint)

    async def _pass_through(self) -> None:
        """The way to the host and back, if there is one."""
        await asyncio.sleep(self._dice.delay(0.05))
        host = self._host
        if host.nature.now() < host.hung_until:
            await asyncio.sleep(6.0)
            raise asyncssh.ConnectionLost("no answer to keepalives")
        if host._lines_cut != self._cut or not host.up:
            raise asyncssh.ConnectionLost("connection lost")

    async def lines(self, command: str) -> AsyncIterator[bytes]:
        """What a long-lived command says, line by line."""
        words = _words(command)
        await self._pass_through()
        async for line in self._host.watch(words[1], int(words[2])):
            yield line
            await self._pass_through()

    def abort(self) -> None:
        """Let go without a word."""

    async def close(self) -> None:
        """Let go."""


def _words(command: str) -> list[str]:
    """What the agent is called with."""
    given = command[len(AGENT_COMMAND) :]
    return shlex.split(given) if "'" in given else given.split()

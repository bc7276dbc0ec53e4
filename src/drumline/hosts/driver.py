"""Drives one host: connect, prepare, start when all are ready, watch; reconnect after each cut.

Every action on a host is idempotent, because the agent remembers what was done; so after a lost
connection, or in a new server, everything is repeated from the top and most of it is done already.
"""

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import asyncssh

from drumline.hosts.agent import wire
from drumline.hosts.agent.wire import AttemptStatus
from drumline.hosts.connection import (
    Connection,
    ConnectionCut,
    HostKeyChanged,
    KnownHosts,
    in_words,
)
from drumline.hosts.health_file import burn_in_line
from drumline.hosts.kept_log import KeptLog, set_aside, size_of
from drumline.hosts.messages import HostRank, attempt_folder, program_message, work_folder
from drumline.hosts.remote import AgentFailed, RemoteAgent
from drumline.hosts.values import Admit, Output, Program, Timing, admit_all
from drumline.observed import HostPhase, HostReport

CUT = (OSError, asyncssh.Error, ConnectionCut, HostKeyChanged)
TAIL_LINES = 20
LONGEST_NAME, MOST_NAMES = 200, 10
"""Characters of a name that a host says it has, and how many names it may have."""
TRIES = 3
"""Failures of the agent, on good connections, after which its host counts as failed."""


class Gate(Protocol):
    """Holds all hosts back until each is ready, then gives them the address of the first host."""

    @property
    def stopped(self) -> bool:
        """Whether the attempt was stopped: nothing starts any more."""

    @property
    def grace(self) -> float:
        """Seconds that a stopped program has to end by itself."""

    def ready(self, host: int) -> None:
        """A host is prepared."""

    def away(self, host: int) -> None:
        """A host cannot be reached."""

    def found_running(self, coordinator: str) -> None:
        """A host already runs the program with this coordinator."""

    async def coordinator(self, place: HostRank, free_port: Callable[[], Awaitable[int]]) -> str:
        """Wait for the other hosts, and return the address where the first host listens."""

    def examine(self, seconds: float) -> None:
        """A host wants a burn-in of so many seconds before the program; the longest counts."""

    @property
    def burnin(self) -> float:
        """Seconds of burn-in on every host before the program; 0 for none."""

    @property
    def begun(self) -> bool:
        """Whether a host may have started already: then the others are to follow."""

    def identify(self, host: int, told: Mapping[str, str]) -> None:
        """Remember what a host says it is."""

    def identity(self, host: int) -> Mapping[str, str]:
        """What it said, to this session or an earlier one."""

    def was_started(self, host: int) -> bool:
        """Whether the program was started there, in this session or an earlier one."""

    def started(self, host: int) -> None:
        """Remember that the program was started there."""


@dataclass(frozen=True)
class Means:
    """The resources of a driver."""

    key: Path
    known: KnownHosts
    log: Path
    clock: Callable[[], float]
    timing: Timing
    changed: Callable[[], None]
    log_limit: int | None = None
    """How many bytes of the log are kept; None is all of it."""
    admit: Admit = admit_all
    """Whether a host may be used, asked once it has said which machine it is."""


class HostDriver:
    """Drives one host until its program has ended."""

    def __init__(self, program: Program, place: HostRank, gate: Gate, means: Means) -> None:
        """Nothing happens before `drive`."""
        self.program = program
        self.place = place
        self._gate = gate
        self._means = means
        self._report = HostReport(place.index, HostPhase.CONNECTING, None, rank=place.rank)
        # A new server meets a host whose program runs: it is not asked again who it is.
        self._report = replace(self._report, identity=gate.identity(place.index))
        self._folder = attempt_folder(program)
        self._agent: RemoteAgent | None = None
        self._connected = asyncio.Event()
        self._pause = means.timing.reconnect_first
        """Seconds until the next connection; doubled until one has been of use."""
        self._recent = b""
        self._speaks = False
        """Whether this connection has told what the program does."""
        self._tail: tuple[str, ...] | None = None
        """The last lines of `_recent`; None until they are read."""
        self._heard_at: float | None = None
        self._reported_at: float | None = None
        self._whole: HostReport | None = None
        """The report with these lines and times; None until it is asked for."""
        self._settled = ""
        """The detail of the final report, to be shown again after a lost connection."""

    def report(self) -> HostReport:
        """What is known now."""
        if self._whole is None:
            self._whole = replace(
                self._report,
                heard_at=self._heard_at,
                reported_at=self._reported_at,
                tail=self._report.tail or self._last_lines(),
            )
        return self._whole

    def _last_lines(self) -> tuple[str, ...]:
        if self._tail is None:
            lines = self._recent.decode("utf-8", "replace").splitlines()
            kept = [line.rstrip()[:500] for line in lines if line.strip()]
            self._tail = tuple(kept[-TAIL_LINES:])
        return self._tail

    async def drive(self) -> None:
        """For ever: connect, go on from the state of the host, and reconnect."""
        timing, failures = self._means.timing, 0
        while True:
            try:
                connection = await Connection.open(
                    self.place.address, self._means.key, self._means.known, timing
                )
                try:
                    await self._on(RemoteAgent(connection, self._heard))
                finally:
                    self._connected.clear()
                    self._agent = None
                    self._gate.away(self.place.index)
                    connection.abort()
            except CUT as trouble:
                self._show(detail=in_words(trouble))
            except Exception as trouble:
                # Whatever the error, this host is retried and the others are not held up.
                failures += 1
                text = str(trouble) if isinstance(trouble, AgentFailed) else repr(trouble)
                self._show(detail=text)
                if failures >= TRIES and self._report.started_at is None:
                    self._show(phase=HostPhase.FAILED, error=text)
            # Hosts of a slice come back together; jitter keeps us from connecting all at once.
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))  # noqa: S311
            self._pause = min(self._pause * 2, timing.reconnect_most)

    async def _on(self, agent: RemoteAgent) -> None:
        """Everything that happens on one connection."""
        await agent.install()
        status = await agent.ask(AttemptStatus, wire.STATUS, self._folder)
        if status.state == "none" and not self._started_here():
            self._begin_log(status.log_size or 0)
        self._speaks = status.state != "exited"  # an end is left to `watch`
        if status.state == "lost" or (status.state == "none" and self._started_here()):
            self._take(status)
        if self._speaks:
            self._reported()
        self._agent = agent
        self._connected.set()
        watching = asyncio.create_task(self._watch(agent))
        going = asyncio.create_task(self._go_on(agent, status))
        try:
            await asyncio.wait({watching, going}, return_when=asyncio.FIRST_COMPLETED)
            if going.done():
                going.result()
            await watching
        finally:
            for task in (watching, going):
                task.cancel()
            await asyncio.gather(watching, going, return_exceptions=True)

    async def _go_on(self, agent: RemoteAgent, status: AttemptStatus) -> None:
        """Go on from the state of the host until the program runs."""
        host = self.place.index
        if self._gate.stopped:
            grace = str(self._gate.grace)
            self._take(await agent.ask(AttemptStatus, wire.STOP, self._folder, grace))
        elif status.state != "none":
            self._gate.found_running(status.coordinator)
            self._gate.started(host)
            self._gate.ready(host)
            self._take_unless_ended(status)
        elif status.stopped or self._started_here():
            self._take(status)
        elif self._report.phase in (HostPhase.FAILED, HostPhase.EXITED):
            self._show(detail=self._settled)
        elif await self._prepare(agent):
            self._show(phase=HostPhase.READY, detail="")
            self._gate.ready(host)
            if self.place.rank is None:
                self._settled = "runs nothing"
                self._show(phase=HostPhase.EXITED, exit_code=0, detail=self._settled)
                return
            coordinator = await self._gate.coordinator(self.place, lambda: self._free_port(agent))
            before = ""
            if self._gate.burnin:
                await agent.install_burn_in()
                before = burn_in_line(self._gate.burnin)
            sent = wire.Start(coordinator=coordinator, before=before)
            now = await agent.ask(AttemptStatus, wire.START, self._folder, sent=sent)
            if now.state != "none":
                self._gate.started(host)
            self._take_unless_ended(now)

    async def _prepare(self, agent: RemoteAgent) -> bool:
        """Free chips, code, set-up. False when this host cannot be prepared."""
        self._show(phase=HostPhase.PREPARING, detail="chips")
        wait = str(self._means.timing.device_wait)
        message = program_message(self.program, self.place)
        prepared = await agent.ask(wire.Prepared, wire.PREPARE, self._folder, wait, sent=message)
        told = _harmless(prepared.identity)
        self._gate.identify(self.place.index, told)
        admission = self._means.admit(self.place.index, told)
        refused = "" if self._gate.begun else admission.refused
        self._show(identity=told, refused=refused)
        if refused:
            return False
        self._gate.examine(admission.burnin)
        if prepared.trouble:
            self._settled = "chips"
            self._show(phase=HostPhase.FAILED, error=prepared.trouble)
            return False
        if not prepared.have_code:
            await self._send_code(agent)
        for step in self.program.steps:
            self._show(detail=f"setup: {step.name}")
            sent = wire.SetUpStep(name=step.name, script=step.script)
            ended = await agent.ask(wire.StepEnded, wire.STEP, self._folder, sent=sent)
            if ended.exit_code != 0 and not self._gate.stopped:
                self._settled = self._report.detail
                self._show(
                    phase=HostPhase.FAILED,
                    exit_code=ended.exit_code,
                    error=ended.error,
                    tail=ended.tail,
                )
                return False
        return not self._gate.stopped

    async def _send_code(self, agent: RemoteAgent) -> None:
        archive, sha = self.program.archive, self.program.archive_sha
        if archive is None or sha is None:
            return
        self._show(detail="code")
        await agent.ask(wire.Received, wire.RECEIVE, sha, sent_file=archive)
        unpacked = await agent.ask(wire.Prepared, wire.UNPACK, sha, work_folder(self.program))
        if not unpacked.have_code:
            raise AgentFailed("the code could not be unpacked")

    async def _free_port(self, agent: RemoteAgent) -> int:
        return (await agent.ask(wire.Port, wire.FREE_PORT)).port

    # Reports of the host -------------------------------------------------------------------------

    async def _watch(self, agent: RemoteAgent) -> None:
        """Until the connection ends, write the log to its file and take in each status."""
        log = KeptLog(self._means.log, self._means.log_limit)
        with contextlib.closing(log):
            async for line in agent.watch(self._folder, log.size):
                self._pause = self._means.timing.reconnect_first
                if line.log is not None:
                    data, have = base64.b64decode(line.log), log.size
                    if line.offset > have:
                        raise AgentFailed(f"the log goes on at {line.offset}, we have {have}")
                    fresh = data[have - line.offset :]
                    log.append(fresh, self._means.clock() if line.at is None else line.at)
                    self._recent = (self._recent + fresh)[-16384:]
                    self._tail = self._whole = None
                if line.status is not None:
                    self._take(line.status)
                    self._speaks = True
                if self._speaks:
                    self._reported()

    def _started_here(self) -> bool:
        """Whether the program of this attempt was once started on this host."""
        return self._gate.was_started(self.place.index)

    def _begin_log(self, on_host: int) -> None:
        """Begin a new log if the host was replaced before it ran; the old log is kept."""
        if size_of(self._means.log) > on_host:
            set_aside(self._means.log)

    def _take_unless_ended(self, status: AttemptStatus) -> None:
        """Take a status, but leave an end to `watch`, which reports it after the whole log."""
        if status.state != "exited":
            self._take(status)

    def _take(self, status: AttemptStatus) -> None:
        """Take the agent's status of the program into the report."""
        known = {
            "started_at": status.started_at,
            "heartbeat": status.heartbeat,
            "shutdown_reason": status.going_down,
        }
        if status.burnin is not None:
            known |= _examined(status.burnin)
        if status.state in {"running", "exited"}:
            # `watch` may report it before `start` is answered, and the host go down in between.
            self._gate.started(self.place.index)
        if status.state == "running":
            if self._report.phase is HostPhase.EXITED:
                return  # the end, reported by `watch`, has overtaken the answer to `start`
            phase = HostPhase.RUNNING
            self._show(
                phase=phase, detail="", error=status.error, error_at=status.error_at, **known
            )
        elif status.state == "exited":
            self._show(
                phase=HostPhase.EXITED,
                detail="",
                exit_code=status.exit_code,
                error=status.error,
                error_at=status.error_at,
                tail=status.tail,
                **known,
            )
        elif status.state == "lost" or self._started_here():
            self._show(
                phase=HostPhase.MISSING,
                detail="the host answers but no longer knows the program: it was restarted",
            )
        elif status.stopped:
            self._show(phase=HostPhase.EXITED, detail="stopped before it ran", exit_code=-15)

    def _heard(self) -> None:
        self._heard_at, self._whole = self._means.clock(), None

    def _reported(self) -> None:
        self._reported_at, self._whole = self._means.clock(), None

    def _show(self, **news: Any) -> None:
        if any(getattr(self._report, name) != value for name, value in news.items()):
            self._report, self._whole = replace(self._report, **news), None
            self._means.changed()

    # Orders to the host --------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """End the program there; a host that cannot be reached in time is left alone."""
        margin = grace + self._means.timing.stop_margin
        try:
            async with asyncio.timeout(margin):
                while True:
                    agent = await self._reached()
                    try:
                        self._take(
                            await agent.ask(AttemptStatus, wire.STOP, self._folder, str(grace))
                        )
                        return
                    except (*CUT, AgentFailed):
                        await asyncio.sleep(0.1)
        except TimeoutError:
            return

    async def run(
        self,
        command: str,
        output: Output,
        timeout: float | None,
        stdin: AsyncIterator[bytes] | None,
    ) -> int:
        """Run a command for the user."""
        timing = self._means.timing
        async with asyncio.timeout(timing.connect_timeout + timing.reconnect_most):
            agent = await self._reached()
        wanted = wire.Command(command=command, timeout=timeout, stdin=stdin is not None)
        return await agent.run_for_user(self._folder, wanted, stdin, output)

    async def _reached(self) -> RemoteAgent:
        while True:
            await self._connected.wait()
            if self._agent is not None:
                return self._agent


def _harmless(identity: Mapping[str, str]) -> dict[str, str]:
    """What a host says it is, fit to be a name: short, and of characters that one can see."""
    return {
        name[:LONGEST_NAME]: "".join(filter(str.isprintable, value[:LONGEST_NAME])).strip()
        for name, value in list(identity.items())[:MOST_NAMES]
    }


def _examined(told: Mapping[str, object]) -> dict[str, Any]:
    """What a host says of its burn-in. It runs the user's code, so nothing is believed as it is."""
    seconds = told.get("seconds")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    verdict = told.get("verdict")
    return {
        "burn_in": verdict if verdict in ("running", "pass", "warn", "fail") else "warn",
        "burn_in_message": str(told.get("said", ""))[:500],
        "burn_in_seconds": float(seconds) if number and 0 <= seconds < 1e9 else 0.0,  # type: ignore[operator,arg-type]
    }

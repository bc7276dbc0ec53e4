"""Run the program of an attempt on one host: connect, prepare, start with the others, watch.

The agent records the completed actions on its host, so every action is idempotent. After a
disconnection or in a new server, the runner repeats all actions from the start, and most of them
have no effect.
"""

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import asyncssh

from drumline.hosts.agent import wire
from drumline.hosts.agent.wire import AttemptStatus
from drumline.hosts.connection import (
    AgentError,
    Connection,
    ConnectionLost,
    HostKeyChanged,
    KnownHosts,
    ProxyFailed,
    UnusableFileError,
    check_archive,
    check_interpreter,
)
from drumline.hosts.contact import contact_failure, describe_connection_error
from drumline.hosts.host_files import burn_in_command
from drumline.hosts.log_segments import LogWriter, received_size, rename_log
from drumline.hosts.outputs import CopyError, OutputFolder
from drumline.hosts.protocol import Admit, HostCopy, OnOutput, admit_all
from drumline.hosts.remote import RemoteAgent
from drumline.hosts.values import (
    HostAssignment,
    ShellProgram,
    Timing,
    attempt_folder,
    code_files,
    program_message,
    work_folder,
)
from drumline.observed import ContactFault, HostPhase, HostReport

CONNECTION_ERRORS = (
    OSError, asyncssh.Error, ConnectionLost, HostKeyChanged, ProxyFailed, UnusableFileError,
)  # fmt: skip
TAIL_LINES = 20
TAIL_BYTES = 16_384
MAX_NAME_LENGTH, MAX_NAMES = 200, 10
"""The limits of the names that a host reports for itself."""
MAX_SENDS = 3
"""The number of times that missing files of the code are sent. One may be removed on the host
before it is unpacked, because the disk is full, or be damaged there."""
MAX_COPIES = 3
"""The number of tries to copy outputs after a disconnection."""
MAX_AGENT_ERRORS = 3
"""Errors of the agent, over working connections, after which its host counts as failed."""


class Gate(Protocol):
    """The barrier where the hosts of a slice wait to start together, and its record of starts."""

    @property
    def stopped(self) -> bool:
        """True if the attempt was stopped: no program starts any more."""

    @property
    def grace(self) -> float:
        """The seconds between SIGTERM and SIGKILL for a stopped program."""

    @property
    def burnin(self) -> float:
        """The seconds of burn-in on every host before the program; 0 for none."""

    @property
    def may_have_started(self) -> bool:
        """True if the program may run on some host. The other hosts must start it then too."""

    def mark_ready(self, host: int) -> None:
        """Mark a host ready to start the program."""

    def mark_unreachable(self, host: int) -> None:
        """Mark a host unreachable. Until the program starts, the other hosts wait for it."""

    def mark_started(self, host: int) -> None:
        """Record that the program was started on a host."""

    def was_started(self, host: int) -> bool:
        """Return True if this or a previous session started the program on a host."""

    def join_running(self, coordinator: str) -> None:
        """Let all hosts join a program that already runs with this coordinator."""

    async def coordinator(
        self, assignment: HostAssignment, free_port: Callable[[], Awaitable[int]]
    ) -> str:
        """Wait until all hosts are ready. Return the address where rank 0 listens."""

    def request_burn_in(self, seconds: float) -> None:
        """Request a burn-in before the program. The longest request counts."""

    def set_identity(self, host: int, identity: Mapping[str, str]) -> None:
        """Record the names that a host reports for its machine."""

    def identity(self, host: int) -> Mapping[str, str]:
        """Return the names of a host that were recorded in this or a previous session."""


@dataclass(frozen=True)
class RunnerResources:
    """The files, clock and limits of a host runner."""

    key: Path
    known_hosts: KnownHosts
    log: Path
    clock: Callable[[], float]
    timing: Timing
    on_change: Callable[[], None]
    """The callback for each change of the host's report."""
    log_limit: int | None = None
    """The number of bytes of the log to keep; None keeps all."""
    admit: Admit = admit_all
    """The function that decides from a host's identity if it may be used."""


class HostRunner:
    """The runner of one host: prepares it, starts the program and follows it to its end."""

    def __init__(
        self,
        program: ShellProgram,
        assignment: HostAssignment,
        gate: Gate,
        resources: RunnerResources,
    ) -> None:
        """Store the arguments. `run_forever` opens the connection."""
        self.program = program
        self.assignment = assignment
        self._gate = gate
        self._resources = resources
        # If a previous session started the program, the identity of the host is already recorded.
        self._report = HostReport(
            assignment.index,
            HostPhase.CONNECTING,
            None,
            rank=assignment.rank,
            identity=gate.identity(assignment.index),
        )
        self._folder = attempt_folder(program)
        self._agent: RemoteAgent | None = None
        self._connected = asyncio.Event()
        self._reconnect_delay = resources.timing.reconnect_first
        """Seconds before the next connection. They double until a connection delivers a line."""
        self._log_tail = b""
        self._status_received = False
        """True if the agent has reported the program's status on this connection."""
        self._tail_lines: tuple[str, ...] | None = None
        """The last lines of `_log_tail`; None until they are needed."""
        self._heard_at: float | None = None
        self._status_at: float | None = None
        self._complete_report: HostReport | None = None
        """`_report` with the last lines and the two times; None until it is needed."""
        self._step = ""
        """The set-up step that runs; empty if none does."""
        self._final_detail = ""
        """The detail of the final report, which `_advance` restores after a disconnection."""

    async def run_forever(self) -> None:
        """Connect, continue from the state of the host, and reconnect, until cancelled."""
        timing, agent_errors = self._resources.timing, 0
        while True:
            connected = False
            try:
                connection = await Connection.open(
                    self.assignment.address,
                    self._resources.key,
                    self._resources.known_hosts,
                    timing,
                )
                connected = True
                self._update_report(contact=None)
                try:
                    await self._use_connection(RemoteAgent(connection, self._on_answer))
                finally:
                    self._connected.clear()
                    self._agent = None
                    self._gate.mark_unreachable(self.assignment.index)
                    connection.abort()
            except CONNECTION_ERRORS as error:
                contact = contact_failure(error, self.assignment.address)
                on_this_side = contact.fault is ContactFault.LOCAL
                self._update_report(
                    detail=describe_connection_error(error),
                    contact=contact if on_this_side or not connected else None,
                )
            except Exception as error:
                # After any other error this host is retried, and the other hosts continue.
                agent_errors += 1
                message = str(error) if isinstance(error, AgentError) else repr(error)
                self._update_report(detail=message)
                if agent_errors >= MAX_AGENT_ERRORS and self._report.started_at is None:
                    self._update_report(phase=HostPhase.FAILED, error=message)
            # The hosts of a slice come back together. Jitter spreads the new connections.
            jitter = random.uniform(0.5, 1.5)  # noqa: S311
            await asyncio.sleep(self._reconnect_delay * jitter)
            self._reconnect_delay = min(self._reconnect_delay * 2, timing.reconnect_most)

    async def _use_connection(self, agent: RemoteAgent) -> None:
        """Continue the attempt until this connection ends or the agent fails."""
        await agent.install()
        status = await agent.ask(AttemptStatus, wire.STATUS, self._folder)
        if status.state == "none" and not self._was_started():
            self._begin_log(status.log_size or 0)
        # `_watch` applies the status `exited`, after it has received the whole log.
        self._status_received = status.state != "exited"
        if status.state == "lost" or (status.state == "none" and self._was_started()):
            self._apply_status(status)
        if self._status_received:
            self._record_status_time()
        self._agent = agent
        self._connected.set()
        watch = asyncio.create_task(self._watch(agent))
        advance = asyncio.create_task(self._advance(agent, status))
        try:
            await asyncio.wait({watch, advance}, return_when=asyncio.FIRST_COMPLETED)
            if advance.done():
                advance.result()  # raises its error, if any
            await watch
        finally:
            for task in (watch, advance):
                task.cancel()
            await asyncio.gather(watch, advance, return_exceptions=True)

    # From an empty host to a running program -----------------------------------------------------

    async def _advance(self, agent: RemoteAgent, status: AttemptStatus) -> None:
        """Continue from the host's status until the program runs."""
        host = self.assignment.index
        if self._gate.stopped:
            grace = str(self._gate.grace)
            self._apply_status(await agent.ask(AttemptStatus, wire.STOP, self._folder, grace))
        elif status.state != "none":
            self._gate.join_running(status.coordinator)
            self._gate.mark_started(host)
            self._gate.mark_ready(host)
            self._apply_unless_exited(status)
        elif status.stopped or self._was_started():
            self._apply_status(status)
        elif self._report.phase in (HostPhase.FAILED, HostPhase.EXITED):
            self._update_report(detail=self._final_detail)
        elif await self._prepare(agent):
            self._update_report(phase=HostPhase.READY, detail="")
            self._gate.mark_ready(host)
            if self.assignment.rank is None:
                self._final_detail = "runs nothing"
                self._update_report(phase=HostPhase.EXITED, exit_code=0, detail=self._final_detail)
            else:
                await self._start(agent)

    async def _prepare(self, agent: RemoteAgent) -> bool:
        """Free the chips, send the code and run the set-up. Return False if that fails."""
        if self.program.interpreter is not None:
            check_interpreter(self.program.interpreter)
        self._update_report(phase=HostPhase.PREPARING, detail="chips")
        result = await agent.ask(
            wire.PrepareResult,
            wire.PREPARE,
            self._folder,
            str(self._resources.timing.device_wait),
            message=program_message(self.program, self.assignment),
        )
        identity = _sanitize_identity(result.identity)
        self._gate.set_identity(self.assignment.index, identity)
        admission = self._resources.admit(self.assignment.index, identity)
        refused = "" if self._gate.may_have_started else admission.refused
        self._update_report(identity=identity, refused=refused)
        if refused:
            return False
        self._gate.request_burn_in(admission.burnin)
        if result.trouble:
            self._final_detail = "chips"
            self._update_report(phase=HostPhase.FAILED, error=result.trouble)
            return False
        if not result.have_code:
            await self._send_code(agent, result.missing)
        self._update_report(has_code=True)
        for step in self.program.steps:
            self._step = step.name
            self._update_report(detail=f"setup: {step.name}")
            message = wire.SetUpStep(
                name=step.name,
                script=step.script,
                retries=self._resources.timing.setup_retries,
                pause=self._resources.timing.setup_pause,
                recipe=None if step.recipe is None else vars(step.recipe),
            )
            try:
                step_result = await agent.ask(
                    wire.StepResult, wire.STEP, self._folder, message=message
                )
            finally:
                self._step = ""
            if step_result.exit_code != 0 and not self._gate.stopped:
                self._final_detail = f"setup: {step.name}"
                self._update_report(
                    phase=HostPhase.FAILED,
                    detail=self._final_detail,
                    exit_code=step_result.exit_code,
                    error=step_result.error,
                    tail=step_result.tail,
                )
                return False
        return not self._gate.stopped

    async def _send_code(self, agent: RemoteAgent, missing: Sequence[str]) -> None:
        """Send the files of the code that a host does not have, and unpack the code."""
        archive, sha = self.program.archive, self.program.archive_sha
        if archive is None or sha is None:
            return
        self._update_report(detail="code")
        large_files = list(self.program.large_files)
        paths = {path.name: path for path in code_files(archive, large_files)}
        code = wire.Code(archive=sha, large_files=large_files, work=work_folder(self.program))
        for _ in range(MAX_SENDS):
            # A host runs the user's code, so it gets only files of this code, whatever it asks for.
            await self._send_files(agent, [paths[name] for name in missing if name in paths])
            result = await agent.ask(wire.CodeResult, wire.UNPACK, message=code)
            if result.have_code:
                return
            missing = result.missing
        raise AgentError("the code could not be unpacked")

    async def _send_files(self, agent: RemoteAgent, paths: Sequence[Path]) -> None:
        for path in paths:
            check_archive(path)
        total, sent = sum(path.stat().st_size for path in paths), 0

        def on_sent(count: int) -> None:
            nonlocal sent
            sent += count
            # Without a call of `on_change`, which would start a round of the supervisor.
            self._report = replace(self._report, sent_bytes=sent, bytes_to_send=total)
            self._complete_report = None

        for path in paths:
            await agent.send_file(path, on_sent)
        self._report = replace(self._report, sent_bytes=0, bytes_to_send=0)
        self._complete_report = None

    async def _start(self, agent: RemoteAgent) -> None:
        """Start the program together with the other hosts."""

        async def free_port() -> int:
            return (await agent.ask(wire.FreePort, wire.FREE_PORT)).port

        coordinator = await self._gate.coordinator(self.assignment, free_port)
        before = ""
        if self._gate.burnin:
            await agent.install_burn_in()
            before = burn_in_command(self._gate.burnin)
        message = wire.Start(coordinator=coordinator, before=before)
        status = await agent.ask(AttemptStatus, wire.START, self._folder, message=message)
        if status.state != "none":
            self._gate.mark_started(self.assignment.index)
        self._apply_unless_exited(status)

    # The report ----------------------------------------------------------------------------------

    def report(self) -> HostReport:
        """Return the current report of the host."""
        if self._complete_report is None:
            self._complete_report = replace(
                self._report,
                heard_at=self._heard_at,
                reported_at=self._status_at,
                tail=self._report.tail or self._last_lines(),
            )
        return self._complete_report

    def _last_lines(self) -> tuple[str, ...]:
        if self._tail_lines is None:
            lines = self._log_tail.decode("utf-8", "replace").splitlines()
            shortened = [line.rstrip()[:500] for line in lines if line.strip()]
            self._tail_lines = tuple(shortened[-TAIL_LINES:])
        return self._tail_lines

    async def _watch(self, agent: RemoteAgent) -> None:
        """Write the log to its file and apply each status, until the connection ends."""
        log = LogWriter(self._resources.log, self._resources.log_limit)
        with contextlib.closing(log):
            lines = agent.watch(self._folder, log.size)
            while (line := await self._next_line(lines)) is not None:
                self._reconnect_delay = self._resources.timing.reconnect_first
                if line.log is not None:
                    self._append_to_log(log, line)
                if line.status is not None:
                    self._apply_status(line.status)
                    self._status_received = True
                if self._status_received:
                    self._record_status_time()

    async def _next_line(self, lines: AsyncIterator[wire.WatchLine]) -> wire.WatchLine | None:
        """Return the next line of `watch`; None after the last one.

        Raises ConnectionLost if none arrives for too long.
        """
        limit = self._resources.timing.watch_silence
        try:
            async with asyncio.timeout(limit):
                return await anext(lines, None)
        except TimeoutError:
            raise ConnectionLost(f"the agent reported nothing for {limit:g} s") from None

    def _append_to_log(self, log: LogWriter, line: wire.WatchLine) -> None:
        start = line.offset - line.skipped
        if start > log.size:
            raise AgentError(f"the log continues at {line.offset}, but {log.size} was expected")
        log.skip_to(line.offset)
        data = base64.b64decode(line.log or "")[log.size - line.offset :]
        log.append(data, self._resources.clock() if line.at is None else line.at)
        self._log_tail = (self._log_tail + data)[-TAIL_BYTES:]
        self._tail_lines = self._complete_report = None

    def _was_started(self) -> bool:
        """Return True if the program of this attempt was ever started on this host."""
        return self._gate.was_started(self.assignment.index)

    def _begin_log(self, size_on_host: int) -> None:
        """Begin a new log if the host was replaced before the program started. Keep the old log."""
        if received_size(self._resources.log) > size_on_host:
            rename_log(self._resources.log)

    def _apply_unless_exited(self, status: AttemptStatus) -> None:
        """Apply a status other than `exited`, which `_watch` applies after the whole log."""
        if status.state != "exited":
            self._apply_status(status)

    def _apply_status(self, status: AttemptStatus) -> None:
        """Update the report from the agent's status of the program."""
        if status.state in {"running", "exited"}:
            # `_watch` may receive this before the answer to START, and the connection may fail
            # between the two.
            self._gate.mark_started(self.assignment.index)
        if status.state == "running":
            # The exit may arrive by `_watch` before the answer to START.
            if self._report.phase is not HostPhase.EXITED:
                self._update_report(
                    phase=HostPhase.RUNNING,
                    detail="",
                    error=status.error,
                    error_at=status.error_at,
                    **_program_fields(status),
                )
        elif status.state == "exited":
            self._update_report(
                phase=HostPhase.EXITED,
                detail="",
                exit_code=status.exit_code,
                error=status.error,
                error_at=status.error_at,
                tail=status.tail,
                chip_holder=_printable(status.chip_holder),
                chip_error=_printable(status.chip_error),
                location=_printable(status.location),
                **_program_fields(status),
            )
        elif status.state == "lost" or self._was_started():
            self._update_report(
                phase=HostPhase.MISSING,
                detail="the host was restarted: it answers, but has no record of the program",
            )
        elif status.stopped:
            self._update_report(
                phase=HostPhase.EXITED, detail="stopped before the program ran", exit_code=-15
            )
        elif self._step:
            reason = _printable(status.repeating)
            self._update_report(detail=f"setup: {self._step}" + (f": {reason}" if reason else ""))

    def _on_answer(self) -> None:
        self._heard_at, self._complete_report = self._resources.clock(), None

    def _record_status_time(self) -> None:
        self._status_at, self._complete_report = self._resources.clock(), None

    def _update_report(self, **fields: Any) -> None:
        if any(getattr(self._report, name) != value for name, value in fields.items()):
            self._report, self._complete_report = replace(self._report, **fields), None
            self._resources.on_change()

    # Commands ------------------------------------------------------------------------------------

    async def stop(self, grace: float) -> bool:
        """Stop the program on this host. Return True if the host confirmed it in time."""
        timeout = grace + self._resources.timing.stop_margin
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    agent = await self._wait_for_agent()
                    try:
                        status = await agent.ask(AttemptStatus, wire.STOP, self._folder, str(grace))
                    except (*CONNECTION_ERRORS, AgentError):
                        await asyncio.sleep(0.1)
                        continue
                    self._apply_status(status)
                    if status.state != "running":
                        return True
                    await asyncio.sleep(1.0)
        return False

    async def run(
        self,
        command: str,
        output: OnOutput,
        timeout: float | None,
        stdin: AsyncIterator[bytes] | None,
    ) -> int:
        """Run a command of the user and return its exit code."""
        timing = self._resources.timing
        async with asyncio.timeout(timing.connect_timeout + timing.reconnect_most):
            agent = await self._wait_for_agent()
        message = wire.Command(command=command, timeout=timeout, stdin=stdin is not None)
        return await agent.run_for_user(self._folder, message, stdin, output)

    async def copy_outputs(
        self, paths: Sequence[str], folder: OutputFolder, deadline: float
    ) -> HostCopy:
        """Copy the outputs of this host, and retry the missing files after a disconnection.

        Errors are in the result. Files that were complete before an error stay.
        """
        timing, result = self._resources.timing, HostCopy()
        for remaining in reversed(range(MAX_COPIES)):
            try:
                async with asyncio.timeout(timing.connect_timeout + timing.reconnect_most):
                    agent = await self._wait_for_agent()
            except TimeoutError:
                result.error = "the host cannot be reached"
                break
            try:
                async with asyncio.timeout(max(0.0, deadline - self._resources.clock())):
                    await folder.copy(agent, self._folder, paths, self.assignment.index, result)
                break
            except CopyError as error:
                result.error = str(error)
                break
            except (*CONNECTION_ERRORS, AgentError) as error:
                result.error = describe_connection_error(error)
                if self._resources.clock() >= deadline:
                    result.error = "not all files were copied in time"
                    break
            if remaining:
                await asyncio.sleep(timing.reconnect_first)
        return result

    async def _wait_for_agent(self) -> RemoteAgent:
        while True:
            await self._connected.wait()
            if self._agent is not None:
                return self._agent


def _program_fields(status: AttemptStatus) -> dict[str, Any]:
    """Return the fields that the reports of a running and of an exited program share."""
    fields = {
        "started_at": status.started_at,
        "heartbeat": status.heartbeat,
        "shutdown_reason": status.going_down,
    }
    return fields if status.burnin is None else fields | _burn_in_fields(status.burnin)


def _burn_in_fields(burn_in: Mapping[str, object]) -> dict[str, Any]:
    """Return the report fields of a burn-in. The host runs user code, so check each value."""
    seconds = burn_in.get("seconds")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    verdict = burn_in.get("verdict")
    return {
        "burn_in": verdict if verdict in ("running", "pass", "warn", "fail") else "warn",
        "burn_in_message": str(burn_in.get("said", ""))[:500],
        "burn_in_seconds": float(seconds) if is_number and 0 <= seconds < 1e9 else 0.0,  # type: ignore[operator,arg-type]
    }


def _sanitize_identity(identity: Mapping[str, str]) -> dict[str, str]:
    """Limit the names that a host reports to short texts of printable characters."""
    return {
        name[:MAX_NAME_LENGTH]: _printable(value)
        for name, value in list(identity.items())[:MAX_NAMES]
    }


def _printable(text: str) -> str:
    """Limit a text that a host reports to a short one of printable characters."""
    return "".join(filter(str.isprintable, text[:MAX_NAME_LENGTH])).strip()

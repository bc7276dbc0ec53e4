"""`drumline init --probe`: request the smallest slice, reach it over SSH, and delete it again.

Each step prints a line. Each answer of the cloud is printed too, and saved without secrets in a
file that a user can send with a report. The slice is deleted whatever happens. It has no owner
label of a job database, so a running server leaves it alone.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncssh

from drumline.chips import LOCAL_ZONES, slice_of, slices, zone_offers
from drumline.cloud.google.errors import Rpc, explain
from drumline.cloud.google.permissions import PERMISSIONS
from drumline.cloud.google.rest import RestCall
from drumline.cloud.google.tpu_api import TpuApi
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.errors import HostError, UserError
from drumline.hosts.connection import (
    Connection,
    KnownHosts,
)
from drumline.hosts.contact import contact_failure, describe_connection_error
from drumline.hosts.protocol import SshLogin
from drumline.hosts.ssh import names_instances, proxy_commands
from drumline.hosts.values import USER, Address, Timing
from drumline.jobs.billing import price_per_hour
from drumline.jobs.config import Config
from drumline.jobs.slice_settings import SliceSettings
from drumline.observed import ListedPlacement, PlacementState

READY_SECONDS = 1200.0
"""The wait for a slice. A granted one takes a few minutes; without capacity, it would wait on."""
CONNECT_SECONDS = 180.0
"""The wait for SSH. The keys of the metadata reach a new host within a minute or two."""
DELETE_SECONDS = 900.0
UNSEEN_SECONDS = 90.0
"""The time for which a slice that was requested and never listed is looked for."""
MAX_DENIALS = 3
"""The denied deletions after which a probe gives up, because a permission is missing."""
MINUTES = 15
"""The usual length of a probe, for the estimate of its cost."""
MAX_SHOWN = 1500
"""The most characters of an answer on the screen. The file has all of it."""
_DENIED = frozenset({Rpc.PERMISSION_DENIED, Rpc.UNAUTHENTICATED})
_REFUSED = _DENIED | {Rpc.INVALID_ARGUMENT, Rpc.FAILED_PRECONDITION, Rpc.RESOURCE_EXHAUSTED}
_CHECK = "uname -sr; python3 --version; ls /dev/accel* /dev/vfio 2>/dev/null | tr '\\n' ' '"


@dataclass(frozen=True)
class ProbePlan:
    """The slice of a probe."""

    project: str
    zone: str
    accelerator: str
    capacity: str

    @property
    def cost(self) -> str:
        """The estimated cost, as a clause."""
        rate = price_per_hour(self.accelerator, self.zone, self.capacity)
        if rate is None:
            return "costs nothing" if self.zone in LOCAL_ZONES else "has no known price"
        return f"costs about ${rate:,.2f} an hour, ${rate * MINUTES / 60:,.2f} for {MINUTES} min"


def plan_probe(
    config: Config, zone: str | None, accelerator: str | None, capacity: str | None
) -> ProbePlan:
    """Return the slice to request: by default the smallest in the first zone of the settings.

    The quota of a zone, if the settings have one, decides the generation and the tier.
    """
    if zone is None:
        zone = config.zones[0] if config.zones else None
    if zone is None:
        raise UserError("--probe: name a zone: drumline init --probe --zone us-central2-b")
    grants = [grant for grant in config.quota if grant.zone == zone]
    if accelerator is None:
        available = [
            candidate
            for candidate in slices()
            if candidate.runtime_image
            and (zone in LOCAL_ZONES or any(o.zone == zone for o in zone_offers(candidate)))
            and (not grants or candidate.generation in {grant.generation for grant in grants})
        ]
        if not available:
            raise UserError(f"--zone {zone}: there is no slice; drumline chips lists the zones")
        accelerator = min(available, key=lambda candidate: candidate.chips).name
    tpu_slice = slice_of(accelerator)
    if tpu_slice.runtime_image is None:
        raise UserError(f"--accelerator {accelerator}: it is only available on GKE")
    offers = [offer.zone for offer in zone_offers(tpu_slice)]
    if zone not in offers and not (config.local and zone in LOCAL_ZONES):
        raise UserError(f"--zone {zone}: it has no {tpu_slice.name}; zones: {', '.join(offers)}")
    if capacity is None:
        granted = (g.capacity for g in grants if g.generation == tpu_slice.generation)
        capacity = next(granted, "spot")
    if capacity not in {"spot", "on-demand", "reserved"}:
        raise UserError(f"--capacity {capacity}: use spot, on-demand or reserved")
    return ProbePlan(config.project, zone, tpu_slice.name, capacity)


# --- The report -------------------------------------------------------------------------------

_SECRET_NAME = re.compile(
    r"(?i)ssh-keys|token|authorization|password|secret|credential|private|startup-script|user-data"
    r"|cookie|api.?key"
)
_SECRET_TEXT = re.compile(
    r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # logins in addresses
    r"|(?i:\b[\w-]*(?:token|password|passwd|secret|(?:api|access)[_-]?key)\s*[=:]\s*[^\s\"',;&]+)"
    r"|\b(?:hf_|gh[a-z]_|github_pat_|glpat-|GOCSPX-|sk-|xox[a-z]-)[\w-]{8,}"
    r"|\b1//0[\w-]{10,}"  # refresh tokens of Google
    r"|ya29\.[\w.-]+"  # access tokens of Google
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # JSON web tokens
    r"|\bAIza[\w-]{30,}"  # API keys
    r"|(?i:\b(?:Bearer|Basic)\s+[\w.+/=-]+)"
    r"|\b(?:ssh|ecdsa|sk)-[\w@.-]+\s+[\w+/=]{20,}"  # SSH keys
    r"|\bAAAA[\w+/=]{40,}"
    r"|-----BEGIN [\s\S]*?(?:-----END [A-Z ]+-----|$)"
    r"|[\w.+-]+@[\w-]+\.[\w.-]+"  # e-mail addresses of users and service accounts
)
REMOVED = "(removed)"


def without_secrets(value: Any) -> Any:
    """Return JSON without tokens, keys, and e-mail addresses."""
    if isinstance(value, dict):
        if isinstance(value.get("key"), str) and re.match(r"ssh-|ecdsa-", value["key"]):
            value = {**value, "value": REMOVED}
        return {
            key: REMOVED if _SECRET_NAME.search(str(key)) and item else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return _SECRET_TEXT.sub(REMOVED, value) if isinstance(value, str) else value


class ProbeReport:
    """The lines of a probe: on the screen, and complete in a file of mode 0600.

    The probe continues without a screen or a file that fails, so that it deletes its slice.
    """

    def __init__(self, path: Path, echo: Callable[[str], None]) -> None:
        """Create the file."""
        self.path = path
        self._print = echo
        self._has_screen = True
        self._has_file = True
        self._step = ""
        self._last_answers: dict[str, str] = {}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def line(self, text: str) -> None:
        """Print a line and save it."""
        self._echo(str(without_secrets(text)))
        self._save(text)

    def begin(self, step: str) -> None:
        """Begin a step, which `done` or `failed` ends."""
        self._step = step

    def done(self, text: str = "") -> None:
        """Report the success of the step."""
        self.line(f"✓ {self._step:<12} {text}".rstrip())

    def failed(self, text: str) -> None:
        """Report the failure of the step."""
        self.line(f"✗ {self._step:<12} {text}")

    def answer(self, call: RestCall, status: int | None, body: bytes) -> None:
        """Print and save an answer of the cloud, unless the call had the same answer before."""
        path = urlsplit(call.url).path
        try:
            shown = json.dumps(without_secrets(json.loads(body or b"{}")))
        except ValueError:
            shown = str(without_secrets(body.decode("utf-8", "replace")))
        request = "" if call.body is None else f" {json.dumps(without_secrets(dict(call.body)))}"
        answer = f"→ {status or 'no answer'}: {shown}"
        if self._last_answers.get(f"{call.method} {path}") == answer:
            return
        self._last_answers[f"{call.method} {path}"] = answer
        self._save(f"    {call.method} {path}{request} {answer}")
        cut = answer if len(answer) <= MAX_SHOWN else f"{answer[:MAX_SHOWN]}…"
        self._echo(f"    {call.method} {path} {cut}")

    def _echo(self, text: str) -> None:
        if self._has_screen:
            try:
                self._print(text)
            except OSError:  # the terminal or the reader of the output is gone
                self._has_screen = False

    def _save(self, text: str) -> None:
        if self._has_file:
            try:
                self._file.write(f"{time.strftime('%H:%M:%S')} {without_secrets(text)}\n")
            except OSError as error:
                self._has_file = False
                self._echo(f"  · the report cannot be written: {error.strerror}")

    def close(self) -> None:
        """Close the file."""
        # A line that could not be written is still buffered, and would fail again.
        with contextlib.suppress(OSError):
            self._file.close()


# --- The steps --------------------------------------------------------------------------------


class _StepFailed(Exception):
    """A step failed, and the report says why."""


@dataclass(frozen=True)
class ProbeAccess:
    """The SSH key of this home, and a file for the host keys of the probe."""

    key: Path
    public_key: str
    known_hosts: Path


@dataclass(frozen=True)
class ProbeLimits:
    """The waits of a probe in seconds."""

    poll: float = 5.0
    ready: float = READY_SECONDS
    connect: float = CONNECT_SECONDS
    delete: float = DELETE_SECONDS
    unseen: float = UNSEEN_SECONDS


class Probe:
    """One run of the steps."""

    def __init__(
        self,
        cloud: TpuApi,
        plan: ProbePlan,
        settings: SliceSettings,
        access: ProbeAccess,
        report: ProbeReport,
        limits: ProbeLimits,
    ) -> None:
        """`settings` are those of config.yaml for all jobs."""
        self._cloud = cloud
        self._plan = plan
        self._settings = settings
        self._access = access
        self._report = report
        self._limits = limits
        self.name = f"dl-probe-{secrets.token_hex(4)}"
        self._steps: asyncio.Future[bool] | None = None
        self._deletion: asyncio.Future[bool] | None = None
        self._told_to_wait = False
        self._seen = False
        """True if the cloud has listed the slice."""
        self._refused = False
        """True if the cloud answered that it did not accept the request."""
        self.may_exist = False
        """True from the request until the deletion is confirmed."""

    async def run(self) -> bool:
        """Take all steps, and delete the slice. Return True if every step succeeded."""
        self._steps = asyncio.ensure_future(self._take_steps())
        succeeded = deleted = False
        try:
            succeeded = await self._steps
        except asyncio.CancelledError:
            self._report.failed("interrupted")
        finally:
            # Also after an error that no step expects.
            deleted = not self.may_exist or await self._try_deletion()
        return succeeded and deleted

    async def _try_deletion(self) -> bool:
        """Delete the slice, unless a second interrupt stops it. Return True if it is gone."""
        self._deletion = asyncio.ensure_future(self._delete())
        try:
            return await self._deletion
        except asyncio.CancelledError:
            self._report.failed(f"interrupted; {self.delete_by_hand()}")
            return False

    def interrupt(self) -> None:
        """Stop the steps and delete the slice. After that, the second call stops it."""
        if self._steps is not None and not self._steps.done():
            self._steps.cancel()
        elif self._deletion is not None and self._told_to_wait:
            self._deletion.cancel()
        else:
            self._told_to_wait = True
            self._report.line("  · the slice is being deleted; once more leaves it behind")

    async def _take_steps(self) -> bool:
        """Take the steps before the deletion. Return False if one failed."""
        try:
            await self._check_access()
            operation = await self._request()
            placement = await self._wait_until_ready(operation)
            await self._connect(placement)
        except _StepFailed:
            return False
        return True

    def _fail(self, error: CloudError | str) -> _StepFailed:
        """Report the failure of a step. Return the exception to raise."""
        if isinstance(error, CloudError):
            meaning = explain(error.code, str(error), self._plan.zone)
            self._report.failed(meaning.sentence)
            self._report.line(f"    the cloud's own words: {meaning.words or error}")
            self._report.line(f"    you can: {meaning.advice}")
        else:
            self._report.failed(error)
        return _StepFailed()

    async def _check_access(self) -> None:
        report = self._report
        report.begin("login")
        try:
            await self._cloud.find(self._plan.zone, self.name)
        except CloudError as error:
            raise self._fail(error) from error
        report.done(f"the Cloud TPU API answers for {self._plan.project} in {self._plan.zone}")
        report.begin("permissions")
        try:
            granted = await self._cloud.granted_permissions([p.name for p in PERMISSIONS])
        except CloudError as error:
            # The test needs an API of its own. Without it, the next steps show what is missing.
            report.line(f"- permissions  not tested: {error}")
            return
        missing = [p for p in PERMISSIONS if p.name not in granted]
        for permission in missing:
            kind = "missing" if permission.required else "missing, which only some jobs need"
            report.line(f"    {permission.name} ({permission.role}): {kind}: {permission.purpose}")
        required = [p.name for p in missing if p.required]
        # A permission on a single account or bucket is not visible here, so this is no failure.
        report.done(f"not granted on the project: {', '.join(required)}" if required else "all")

    async def _request(self) -> str:
        """Request the slice. Return the name of the operation that creates it."""
        report, plan = self._report, self._plan
        report.begin("request")
        request = PlacementRequest(
            name=self.name,
            zone=plan.zone,
            accelerator=plan.accelerator,
            tier=plan.capacity,
            labels={**self._settings.labels, "drumline-probe": "true"},
            login=SshLogin(USER, self._access.public_key),
            options=self._settings.options(),
        )
        self.may_exist = True
        try:
            operation = await self._cloud.ask(request)
        except CloudError as error:
            self._refused = error.code in _REFUSED
            raise self._fail(error) from error
        report.done(f"{self.name}: {plan.accelerator}, {plan.capacity}, in {plan.zone}")
        return operation

    async def _wait_until_ready(self, operation: str) -> ListedPlacement:
        report, before = self._report, ""
        report.begin("state")
        hosts = slice_of(self._plan.accelerator).hosts
        try:
            async with asyncio.timeout(self._limits.ready):
                while True:
                    placement = await self._cloud.find(self._plan.zone, self.name)
                    self._seen |= placement is not None
                    state = placement.cloud_state if placement else "not listed yet"
                    if state != before:
                        report.line(f"  · state        {state}")
                        before = state
                    if placement is None and operation:
                        creation = await self._cloud.operation(operation)
                        if creation is not None and creation.error is not None:
                            self._refused = True
                            raise self._fail(creation.error)
                    if placement is not None and placement.state is PlacementState.LOST:
                        refusal = placement.refusal
                        raise self._fail(refusal.text if refusal else placement.lost_reason)
                    if (
                        placement is not None
                        and placement.state is PlacementState.READY
                        and len(placement.endpoints) == hosts
                    ):
                        break
                    await asyncio.sleep(self._limits.poll)
        except TimeoutError:
            raise self._fail(
                f"still {before} after {self._limits.ready / 60:.0f} min; if it waits for "
                "resources, try another zone or tier: --zone, --accelerator, --capacity"
            ) from None
        except CloudError as error:
            raise self._fail(error) from error
        report.done(before)
        report.begin("addresses")
        report.done(
            ", ".join(f"{end.internal_ip} (SSH {end.ssh_ip})" for end in placement.endpoints)
        )
        return placement

    async def _connect(self, placement: ListedPlacement) -> None:
        report = self._report
        report.begin("host keys")
        command = self._settings.proxy_command
        try:
            keys = await self._cloud.host_keys(placement)
            names: list[str | None] = [None] * len(placement.endpoints)
            if command and names_instances(command):
                names = await self._cloud.instance_names(placement)
        except CloudError as error:
            raise self._fail(error) from error
        if command and names_instances(command) and None in names:
            raise self._fail("the cloud publishes no name of an instance, which %n stands for")
        published = sum(key is not None for key in keys)
        report.done(f"{published} of {len(placement.endpoints)} hosts publish their key")
        keys = [*keys, *[None] * len(placement.endpoints)]
        proxies = proxy_commands(command, placement, names) if command else []
        for index, endpoint in enumerate(placement.endpoints):
            address = Address(
                endpoint.ssh_ip,
                endpoint.ssh_port,
                endpoint.internal_ip,
                keys[index],
                proxies[index] if proxies else (),
            )
            report.begin(f"SSH host {index}")
            report.done(await self._check_host(address))

    async def _check_host(self, address: Address) -> str:
        """Connect to a host and run a command there. Return the output on one line."""
        deadline = time.monotonic() + self._limits.connect
        known_hosts = KnownHosts(self._access.known_hosts)
        while True:
            try:
                connection = await Connection.open(address, self._access.key, known_hosts, Timing())
                try:
                    completed = await connection.run(_CHECK)
                finally:
                    await connection.close()
            except (OSError, asyncssh.Error, HostError) as error:
                reason = describe_connection_error(error)
                if time.monotonic() > deadline:
                    change = contact_failure(error, address).change
                    raise self._fail(
                        f"{reason}; you can: {change}" if change else reason
                    ) from error
                self._report.line(f"  · {reason}; trying again")
                await asyncio.sleep(self._limits.poll)
            else:
                return " · ".join(completed.stdout.split("\n")).strip(" ·")

    async def _delete(self) -> bool:
        """Delete the slice until the cloud confirms that it is gone. Return True then."""
        report, zone = self._report, self._plan.zone
        report.begin("deletion")
        last, denials, started = "the cloud still lists it", 0, time.monotonic()
        try:
            async with asyncio.timeout(self._limits.delete):
                while True:
                    try:
                        placement = await self._cloud.find(zone, self.name)
                        self._seen |= placement is not None
                        # A new resource may be missing from listings for a while.
                        settled = time.monotonic() - started >= self._limits.unseen
                        if placement is None and (self._seen or self._refused or settled):
                            break
                        parts = [part.name for part in placement.slices] if placement else []
                        await self._cloud.release(zone, self.name, parts)
                    except CloudError as error:
                        last = str(error)
                        denials += error.code in _DENIED
                        if denials >= MAX_DENIALS:
                            raise TimeoutError from error
                    await asyncio.sleep(self._limits.poll)
        except TimeoutError:
            report.failed(f"not confirmed: {last}; {self.delete_by_hand()}")
            return False
        self.may_exist = False
        report.done("confirmed: the slice and its request are gone")
        return True

    def delete_by_hand(self) -> str:
        """Return the advice for a slice that may still exist."""
        return (
            "it may still exist and cost money: gcloud compute tpus queued-resources delete "
            f"{self.name} --zone {self._plan.zone} --project {self._plan.project} --force"
        )


def probe_limits(config: Config) -> ProbeLimits:
    """Return the waits for a cloud: the emulator needs seconds."""
    fast = ProbeLimits(poll=0.2, ready=120.0, connect=60.0, delete=60.0, unseen=1.0)
    return fast if config.local else replace(ProbeLimits(), poll=min(config.poll_seconds, 5.0))

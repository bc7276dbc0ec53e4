"""Check job files with the settings of this server, and pack their code.

The schema is imported with the first job file, because building it takes an eighth of the server's
start.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from drumline.cloud.protocol import Cloud, CloudError
from drumline.hosts import code
from drumline.hosts.bundled_package import BundledPackage, choose_package
from drumline.hosts.packing.folders import require_workdir
from drumline.hosts.packing.rules import (
    INTERRUPTED,
    RULES,
    LeftOut,
    PackingRules,
    left_out_json,
)
from drumline.hosts.packing.selection import PackingProgress
from drumline.jobs.billing import quota_warnings
from drumline.jobs.config import Config
from drumline.jobs.connection import CONTENT_TOO_LARGE
from drumline.jobs.controller.tasks import is_disk_error
from drumline.jobs.core.state import Candidate
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.slice_settings import check_zones
from drumline.observed import FaultType

if TYPE_CHECKING:
    from drumline.jobs.spec import JobSpec


@dataclass(frozen=True)
class PackingOptions:
    """What a client requests for the packing of its code."""

    allow_large: bool = False
    """True if the user has allowed to send large code."""
    token: str = ""
    """The name under which the client asks for the progress, or cancels the request."""
    progress: PackingProgress = field(default_factory=PackingProgress)

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the options from a request."""
        return cls(body.get("allow_large", False), body.get("packing", ""))


_DEFAULT_OPTIONS = PackingOptions()


class JobFiles:
    """Checks and packs job files with the settings of this server."""

    def __init__(self, config: Config, cloud: Cloud, archives: Path) -> None:
        """`archives` is the folder for packed code."""
        self._config = config
        self._cloud = cloud
        self._code = archives
        self._progress: dict[str, PackingProgress] = {}
        """The progress of requests that pack code, by the tokens of their clients."""

    @contextmanager
    def track(self, options: PackingOptions) -> Iterator[None]:
        """While a request is executed, let its client ask for its progress and cancel it."""
        self._progress[options.token] = options.progress
        try:
            yield
        finally:
            self._progress.pop(options.token, None)

    def progress(self, token: str) -> dict[str, int]:
        """Return the bytes that were read and their total, while code is being packed."""
        progress = self._tracked(token)
        return {"bytes": progress.bytes, "total": progress.total}

    def cancel(self, token: str) -> dict[str, str]:
        """Cancel a request that packs code, because its user has interrupted the command."""
        self._tracked(token).cancelled = True
        return {"text": "the request is being cancelled"}

    def _tracked(self, token: str) -> PackingProgress:
        if (progress := self._progress.get(token)) is None:
            raise RequestError("nothing is being packed for this client", 404)
        return progress

    def validate(self, raw: Mapping[str, Any]) -> "JobSpec":
        """Read a job file from JSON. Raise RequestError if it is invalid."""
        from drumline.jobs.spec import SpecError, validate

        try:
            return validate(raw)
        except SpecError as error:
            raise RequestError(str(error)) from None

    async def login_error(self, raw: Mapping[str, Any]) -> str:
        """Return a message if the login to the cloud is missing or expired, else empty.

        An invalid job file is reported first. A network error says nothing about the login.
        """
        self.validate(raw)
        try:
            await self._cloud.check_login()
        except CloudError as error:
            if self._cloud.explain(error, "").fault.kind is FaultType.LOGIN:
                return str(error)
        return ""

    async def check(self, raw: Mapping[str, Any]) -> "tuple[JobSpec, tuple[Candidate, ...]]":
        """Read a job file from JSON. Return it with the slices that it can run on here."""
        from drumline.jobs.spec.zones import (
            bucket_uses,
            candidates,
            check_regions,
            checkpoint_error,
            mount_error,
        )

        spec = self.validate(raw)
        config = self._config
        if not config.local and spec.project not in {None, config.project}:
            raise RequestError(
                f"project: this server uses {config.project}, not {spec.project};"
                " set another DRUMLINE_HOME for another project"
            )
        message = mount_error(spec, local=config.local)
        if message := message or checkpoint_error(spec, local=config.local):
            raise RequestError(message)
        choices = candidates(spec, local=config.local)
        if spec.zones == "any" and not config.local and config.zones:
            choices = tuple(c for c in choices if c.zone in config.zones)
        locations: dict[str, str | None] = {}
        for use in bucket_uses(spec):
            try:
                locations[use.bucket] = await self._cloud.bucket_location(use.bucket)
            except CloudError:
                locations[use.bucket] = None
        choices, message = check_regions(spec, choices, locations)
        if message:
            raise RequestError(message)
        settings = spec.slice_settings.over(config.slice_settings)
        choices, message = check_zones(settings, choices, any_zone=spec.zones == "any")
        if message:
            raise RequestError(message)
        if not choices:
            names = ", ".join(spec.accelerator)
            raise RequestError(
                f"zones: none of your zones has {names}; drumline chips {spec.accelerator[0]} "
                "lists the zones"
            )
        return spec, choices

    def warnings(
        self, spec: "JobSpec", choices: tuple[Candidate, ...], bundled: BundledPackage
    ) -> list[str]:
        """Return warnings about quota and packages for a valid job file."""
        config = self._config
        warnings = [] if config.local else quota_warnings(choices, spec.capacity, config.quota)
        return [*warnings, bundled.warning] if bundled.warning else warnings

    async def choose_package(self, spec: "JobSpec") -> BundledPackage:
        """Decide if the Drumline package is sent to the hosts with the code."""
        scripts, python = (spec.run, spec.setup or ""), spec.python.model_dump()
        local = self._config.local
        if spec.workdir is None:
            return choose_package(None, scripts, python, local=local)
        with _reading(spec.workdir):
            require_workdir(spec.workdir, self._config.home)
            return await asyncio.to_thread(
                choose_package, spec.workdir, scripts, python, local=local
            )

    async def pack(
        self,
        spec: "JobSpec",
        bundled: BundledPackage,
        options: PackingOptions = _DEFAULT_OPTIONS,
    ) -> dict[str, Any] | None:
        """Pack the job's code and describe the archive. Return None if there is no code."""
        if spec.workdir is None and bundled.package is None:
            return None
        with _reading(spec.workdir):
            packed = await asyncio.to_thread(
                code.pack,
                spec.workdir,
                self._code,
                package=bundled.package,
                rules=self._rules(spec),
                progress=options.progress,
                allow_large=options.allow_large,
            )
        self._require_requirements_file(spec, packed.left_out)
        return {
            "sha": packed.sha256,
            "large_files": packed.large_files,
            "files": packed.files,
            "bytes": packed.bytes,
            "drumline": bundled.use,
            "rules": RULES,
            "largest": packed.largest,
            **left_out_json(packed.left_out),
        }

    async def measure(self, spec: "JobSpec", bundled: BundledPackage) -> dict[str, Any] | None:
        """Describe the archive that `pack` would make, without writing it."""
        if spec.workdir is None:
            if bundled.package is None:
                return None
            return {"files": 0, "bytes": 0, "drumline": bundled.use, "left_out": []}
        with _reading(spec.workdir):
            measured = await asyncio.to_thread(code.measure, spec.workdir, rules=self._rules(spec))
        self._require_requirements_file(spec, measured.left_out)
        return {
            "files": measured.files,
            "bytes": measured.bytes,
            "drumline": bundled.use,
            "largest": measured.largest,
            **left_out_json(measured.left_out),
        }

    def _rules(self, spec: "JobSpec") -> PackingRules:
        """Return the packing rules of a job file."""
        return PackingRules(
            include=spec.include,
            checkpoint=spec.checkpoint,
            mounts=spec.mounts,
            home=self._config.home,
        )

    def _require_requirements_file(self, spec: "JobSpec", left_out: Sequence[LeftOut]) -> None:
        """Raise RequestError if the requirements file would not be sent."""
        name = spec.python.requirements
        for entry in left_out if isinstance(name, str) else ():
            assert isinstance(name, str)
            if entry.path == name or (entry.path.endswith("/") and name.startswith(entry.path)):
                raise RequestError(
                    f"python.requirements: {name} would not be sent ({entry.reason}); "
                    "add it to include"
                )


def require_wanted(options: PackingOptions) -> None:
    """Raise RequestError if the client has cancelled the request."""
    if options.progress.cancelled:
        raise RequestError(INTERRUPTED, 409)


@contextmanager
def _reading(workdir: Path | None) -> Iterator[None]:
    """Turn an error of reading the user's files into a RequestError.

    Files may vanish, change or lose their permissions at any moment while they are read.
    """
    try:
        yield
    except code.LargeCodeError as error:
        raise RequestError(
            f"{error}; .drumlineignore excludes files, and --yes (in Python allow_large=True)"
            " sends them",
            CONTENT_TOO_LARGE,
        ) from None
    except code.CodeError as error:
        raise RequestError(str(error)) from None
    except OSError as error:
        if is_disk_error(error):  # of the archive in Drumline's home
            raise
        raise RequestError(
            f"workdir: {error.filename or workdir} cannot be read"
            f" ({error.strerror or type(error).__name__}); if its files changed while they were"
            " packed, try again"
        ) from None

"""From a job file to a job: what is wrong with it here, where it may run, its packed code.

The schema is imported with the first job file: building it takes an eighth of the server's start.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.cloud.protocol import Cloud, CloudError
from drumline.hosts import code
from drumline.hosts.companion import Companion, companion
from drumline.hosts.packing.folders import require_workdir
from drumline.hosts.packing.rules import RULES, LeftOut, PackingRules, left_out_json
from drumline.jobs.billing import quota_warnings
from drumline.jobs.config import Config
from drumline.jobs.core.state import Candidate
from drumline.jobs.server.verbs import Mistake

if TYPE_CHECKING:
    from drumline.jobs.spec import JobSpec


class JobFiles:
    """Reads job files by the settings of this server."""

    def __init__(self, config: Config, cloud: Cloud, archives: Path) -> None:
        """`archives` is the folder for packed code."""
        self._config = config
        self._cloud = cloud
        self._code = archives

    def valid(self, raw: Mapping[str, Any]) -> "JobSpec":
        """The job that this JSON describes."""
        from drumline.jobs.spec import SpecError, validate

        try:
            return validate(raw)
        except SpecError as wrong:
            raise Mistake(str(wrong)) from None

    async def checked(self, raw: Mapping[str, Any]) -> "tuple[JobSpec, tuple[Candidate, ...]]":
        """The job that this JSON describes, and the slices here that it can run on."""
        from drumline.jobs.spec.places import (
            bucket_uses,
            candidates,
            checkpoint_problem,
            region_conflicts,
        )

        spec = self.valid(raw)
        config = self._config
        if not config.local and spec.project not in {None, config.project}:
            raise Mistake(
                f"project: this server works in {config.project}, not {spec.project};"
                " use another DRUMLINE_HOME for another project"
            )
        problem = checkpoint_problem(spec, local=config.local)
        if problem:
            raise Mistake(problem)
        choices = candidates(spec, local=config.local)
        if spec.zones == "any" and not config.local and config.zones:
            choices = tuple(c for c in choices if c.zone in config.zones)
        locations: dict[str, str | None] = {}
        for use in bucket_uses(spec):
            try:
                locations[use.bucket] = await self._cloud.bucket_location(use.bucket)
            except CloudError:
                locations[use.bucket] = None
        left, refusal = region_conflicts(spec, choices, locations)
        if refusal:
            raise Mistake(refusal)
        if not left:
            wanted = ", ".join(spec.accelerator)
            raise Mistake(f"zones: none of your zones has {wanted}; drumline chips says which do")
        return spec, left

    def warnings(
        self, spec: "JobSpec", choices: tuple[Candidate, ...], along: Companion
    ) -> list[str]:
        """What may go wrong with a job though its file is valid."""
        config = self._config
        short = [] if config.local else quota_warnings(choices, spec.capacity, config.quota)
        return [*short, along.warning] if along.warning else short

    async def companion(self, spec: "JobSpec") -> Companion:
        """Whether Drumline's own package goes to the hosts with the code."""
        scripts, python = (spec.run, spec.setup or ""), spec.python.model_dump()
        local = self._config.local
        if spec.workdir is None:
            return companion(None, scripts, python, local=local)
        try:
            require_workdir(spec.workdir, self._config.home)
            return await asyncio.to_thread(companion, spec.workdir, scripts, python, local=local)
        except code.CodeError as wrong:
            raise Mistake(str(wrong)) from None

    async def pack(self, spec: "JobSpec", along: Companion) -> dict[str, Any] | None:
        """The archive of the job's code; None where it has no code."""
        if spec.workdir is None and along.package is None:
            return None
        try:
            packed = await asyncio.to_thread(
                code.pack,
                spec.workdir,
                self._code,
                package=along.package,
                rules=self._rules(spec),
            )
        except code.CodeError as wrong:
            raise Mistake(str(wrong)) from None
        self._require_requirements(spec, packed.left_out)
        return {
            "sha": packed.sha256,
            "files": packed.files,
            "bytes": packed.bytes,
            "drumline": along.use,
            "rules": RULES,
            **left_out_json(packed.left_out),
        }

    async def measure(self, spec: "JobSpec", along: Companion) -> dict[str, Any] | None:
        """What `pack` would send, without writing anything."""
        if spec.workdir is None:
            nothing: dict[str, Any] = {
                "files": 0,
                "bytes": 0,
                "drumline": along.use,
                "left_out": [],
            }
            return None if along.package is None else nothing
        try:
            measured = await asyncio.to_thread(code.measure, spec.workdir, rules=self._rules(spec))
        except code.CodeError as wrong:
            raise Mistake(str(wrong)) from None
        self._require_requirements(spec, measured.left_out)
        return {
            "files": measured.files,
            "bytes": measured.bytes,
            "drumline": along.use,
            **left_out_json(measured.left_out),
        }

    def _rules(self, spec: "JobSpec") -> PackingRules:
        """The packing rules of a job file."""
        return PackingRules(
            include=spec.include,
            checkpoint=spec.checkpoint,
            mounts=spec.mounts,
            home=self._config.home,
        )

    def _require_requirements(self, spec: "JobSpec", left_out: Sequence[LeftOut]) -> None:
        """Raise Mistake if the hosts would not get the file of requirements."""
        name = spec.python.requirements
        for entry in left_out if isinstance(name, str) else ():
            assert isinstance(name, str)
            if entry.path == name or (entry.path.endswith("/") and name.startswith(entry.path)):
                raise Mistake(
                    f"python.requirements: {name} would not be sent ({entry.reason}); "
                    "name it under include"
                )

"""The keys of a job file: what each means, what it may be, and an example.

The descriptions and examples are the documentation: docs/jobs.md is made from them. Validation
needs nothing but the values, so that what `model_dump(mode="json")` writes reads back anywhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drumline.jobs.spec import checks, storage
from drumline.jobs.spec import zones as zone_checks
from drumline.jobs.spec.checks import Wrong, shown
from drumline.jobs.spec.yaml_lines import Path as KeyPath

KEEP_SECONDS = 3600.0
"""Seconds that a cancelled job keeps its slice: enough to fix a bug, not a night's bill."""

Allowance = Annotated[int | Literal["unlimited"], BeforeValidator(checks.allowance)]


def _or_none(check: Callable[[object], Any]) -> BeforeValidator:
    """The check, for a key that may be left empty."""
    return BeforeValidator(lambda value: None if value is None else check(value))


def _sent_along(value: object) -> bool | str:
    if value is None or value == "auto":
        return "auto"
    if isinstance(found := checks.plain(value), bool):
        return found
    raise Wrong(f"is {shown(value)}; it takes auto, true or false")


class Python(BaseModel):
    """Where the program's Python comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[
        Literal["system", "uv", "venv", "conda", "docker"],
        BeforeValidator(lambda value: checks.choice(value, checks.KINDS)),
    ] = Field(
        description="`system` (the host's own), `uv`, `venv`, `conda` or `docker`.",
        examples=["uv"],
    )
    version: Annotated[str | None, _or_none(checks.version)] = Field(
        default=None,
        description="The version of Python. For `uv`, `venv` and `conda`.",
        examples=["3.12"],
    )
    requirements: Annotated[str | tuple[str, ...] | None, _or_none(checks.requirements)] = Field(
        default=None,
        description="What to install: a file in `workdir`, or a list of packages.",
        examples=["requirements.txt", ["jax[tpu]==0.10.0", "optax"]],
    )
    image: Annotated[str | None, _or_none(checks.image)] = Field(
        default=None,
        description="The container image. For `docker`, which needs it.",
        examples=["python:3.12-slim"],
    )
    drumline: Annotated[bool | Literal["auto"], BeforeValidator(_sent_along)] = Field(
        default="auto",
        description="Whether the hosts get Drumline, of the version that you have here: `auto` "
        "when the code imports it and does not bring it, `true` always, `false` never.",
        examples=[True],
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        flaws: list[tuple[KeyPath, str]] = []
        if self.kind == "docker" and self.image is None:
            flaws.append((("image",), "is missing; docker needs one, like python:3.12-slim"))
        if self.kind != "docker" and self.image is not None:
            flaws.append((("image",), f"is for docker, not for {self.kind}"))
        if self.kind in {"system", "docker"} and self.version is not None:
            brings = "the image" if self.kind == "docker" else "the host"
            flaws.append((("version",), f"{brings} has its own; uv, venv and conda take one"))
        if flaws:
            raise Wrong.all_of(flaws)
        return self


class Retry(BaseModel):
    """How often each kind of failure is forgiven."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failures: Allowance = Field(
        default=3, description="Failures of your program, hanging included.", examples=[1]
    )
    bad_hosts: Allowance = Field(
        default=10, description="Slices given back because of a bad host.", examples=[20]
    )
    preemptions: Allowance = Field(
        default="unlimited", description="Slices taken by the cloud.", examples=[100]
    )


def _python(value: object) -> object:
    if value is None or isinstance(value, str):
        return {"kind": value or "system"}
    if isinstance(checks.plain(value), int | float):
        raise Wrong(f"is {shown(value)}; write {{kind: uv, version: {shown(value)}}}")
    return value if isinstance(value, Python) else checks.map_of(value, "kind: uv")


def _retry(value: object) -> object:
    return value if isinstance(value, Retry) else checks.map_of(value, "failures: 1")


def _workdir(value: object) -> Path | None:
    if value is None or value == "none":
        return None
    path = Path(value if isinstance(value, Path) else checks.text(value))
    if not path.is_absolute():
        raise Wrong(f"{shown(path)} is not an absolute folder")
    return path


class JobSpec(BaseModel):
    """A job as its file describes it, every default filled in and every name canonical."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, BeforeValidator(checks.line_of_text)] = Field(
        default="job",
        description="What the job is called in lists. Default: the file's name without its ending.",
        examples=["llama-1b"],
    )
    accelerator: Annotated[tuple[str, ...], BeforeValidator(zone_checks.accelerators)] = Field(
        description="The slice you want. A list is an order of preference.",
        examples=["v4-128", ["v4-128", "v5litepod-64"]],
    )
    zones: Literal["any"] | tuple[str, ...] = Field(
        default="any",
        description="Where it may be: zones in order of preference, or `any` zone that has it. "
        "Default: `any`.",
        examples=["any", ["us-central2-b", "europe-west4-b"]],
    )
    capacity: Annotated[
        Literal["spot", "on-demand", "reserved"],
        BeforeValidator(
            lambda value: checks.choice(
                value, checks.CAPACITIES, {"preemptible": "spot", "ondemand": "on-demand"}
            )
        ),
    ] = Field(
        default="spot",
        description="`spot` can be taken away at any minute and costs least. `on-demand` and "
        "`reserved` stay. Default: `spot`.",
        examples=["on-demand"],
    )
    workdir: Annotated[Path | None, BeforeValidator(_workdir)] = Field(
        default=None,
        description="The folder with your code, seen from the job file. It is sent to every host, "
        "without what `.gitignore` names and without secrets (`include`). Default: the job file's "
        "folder. `none` sends nothing.",
        examples=["../llama", "none"],
    )
    include: Annotated[tuple[str, ...], BeforeValidator(checks.include)] = Field(
        default=(),
        description="Files in `workdir` to send although they look secret or only you can read "
        "them (see [what is sent](#what-is-sent)). A key or a file of passwords must be named by "
        "its path in `workdir`; patterns as in `.gitignore` count only for files that are left out "
        "because only you can read them. Drumline's home is never sent.",
        examples=[["deploy/test_key.pem"], ["*.py", "configs/"]],
    )
    setup: Annotated[str | None, _or_none(checks.script)] = Field(
        default=None,
        description="Shell commands that run once on every fresh host, in `workdir`, before `run`.",
        examples=["sudo apt-get install -y libsndfile1\n"],
    )
    environment: Annotated[dict[str, str], BeforeValidator(checks.environment)] = Field(
        default_factory=dict,
        description="Variables for `setup` and `run`. Numbers and booleans arrive as written.",
        examples=[{"LEARNING_RATE": "3e-4", "XLA_FLAGS": "--xla_dump_to=/tmp/xla"}],
    )
    secrets: Annotated[tuple[str, ...], BeforeValidator(checks.secrets)] = Field(
        default=(),
        description="Names of variables whose values are taken from your environment at `create`. "
        "They are kept in a file of their own until the job ends, and nowhere else.",
        examples=[["HF_TOKEN", "WANDB_API_KEY"]],
    )
    python: Annotated[Python, BeforeValidator(_python)] = Field(
        default=Python(kind="system"),
        description="Where Python comes from: a kind alone, or a map with the keys below. "
        "Default: `system`.",
        examples=["uv", {"kind": "docker", "image": "python:3.12-slim"}],
    )
    mounts: Annotated[dict[str, str], BeforeValidator(storage.mounts)] = Field(
        default_factory=dict,
        description="Folders on the hosts that show a bucket. The bucket must be in the region of "
        "the slice.",
        examples=[{"/data": "gs://lab-data-us-central2/c4"}],
    )
    run: Annotated[str, BeforeValidator(checks.script)] = Field(
        description="What to run on every host, in `workdir`, by `bash -eo pipefail`: the first "
        "line that fails ends it.",
        examples=["python train.py --config llama_1b"],
    )
    hosts: Annotated[Literal["all"] | tuple[int, ...], BeforeValidator(checks.hosts)] = Field(
        default="all",
        description="The hosts that run it, by number from 0. Default: `all`.",
        examples=[[0]],
    )
    checkpoint: Annotated[str | None, _or_none(storage.checkpoint)] = Field(
        default=None,
        description="Where the program keeps its checkpoints: a place in a bucket, or a folder. "
        "Each job gets a sub-folder of its own, named by the id of the job database and the job. "
        "On Google a folder must be below a mount. On the local cloud a relative folder is seen "
        "from the job file.",
        examples=["gs://lab-data-us-central2/checkpoints"],
    )
    retry: Annotated[Retry, BeforeValidator(_retry)] = Field(
        default=Retry(),
        description="How often each kind of failure is forgiven: a number from 0 on, or "
        "`unlimited`.",
        examples=[{"failures": 1, "bad_hosts": 20}],
    )
    burnin: Annotated[Literal["off", "short", "long"], BeforeValidator(checks.burnin)] = Field(
        default="off",
        description="Whether the chips are tested on every fresh slice before `run`: `short` takes "
        "half a minute, `long` three, most of it compiling. A slice that fails is given back and "
        "its host remembered (docs/health.md). A host with a past is tested whatever stands here. "
        "Default: `off`.",
        examples=["short"],
    )
    parking: Annotated[int, BeforeValidator(checks.parking)] = Field(
        default=0,
        description="How many slices with a bad host are kept, at your cost, so that the cloud has "
        "to give others; they are released when the program runs, or when no other slice is to be "
        "had. Default: `0`, which gives them back at once.",
        examples=[1],
    )
    project: Annotated[str | None, _or_none(checks.project)] = Field(
        default=None,
        description="The Google Cloud project. Default: the one that `drumline init` wrote down.",
        examples=["lab-tpu-1"],
    )
    allow_cross_region: Annotated[bool, BeforeValidator(checks.yes_or_no)] = Field(
        default=False,
        description="Whether buckets may be in another region than the slice, which costs by the "
        "gigabyte. Default: `false`.",
        examples=[True],
    )
    stop_grace: Annotated[float, BeforeValidator(checks.seconds)] = Field(
        default=30.0,
        description="How long the program has between SIGTERM and SIGKILL when it is ended: "
        "seconds, or `30s`, `2m`. Default: `30`.",
        examples=["2m"],
    )
    keep: Annotated[float, BeforeValidator(checks.keep)] = Field(
        default=KEEP_SECONDS,
        description="How long a cancelled job keeps its slice for a `resume`, at your cost: "
        "seconds, `30m`, `2h`; `0` releases it at once. Default: `1h`.",
        examples=["10m"],
    )
    progress: Annotated[str | None, _or_none(checks.progress)] = Field(
        default=None,
        description="A regular expression that finds the step in the log, for programs without a "
        "heartbeat. It has a group `step`; other groups (`loss`, `total`, `rate`) are shown and "
        "plotted as a heartbeat's are. One that takes too long for a line is refused, or given up "
        "when the log shows it.",
        examples=[r"step (?P<step>\d+)", r"completed step: (?P<step>\d+), .*loss: (?P<loss>\S+)"],
    )
    stuck_after: Annotated[float | Literal["never"], BeforeValidator(checks.pause)] = Field(
        default=1800.0,
        description="How long the program may stay on one step before it is ended and started "
        "again: seconds, `30m`, `2h`, or `never`. Three times as long on the first step of an "
        "attempt and on the last. Programs that never told a step are left alone. Default: `30m`.",
        examples=["10m", "never"],
    )

    @field_validator("zones", mode="before")
    @classmethod
    def _zones(cls, value: object, info: ValidationInfo) -> object:
        return zone_checks.zones(value, info.data.get("accelerator"))

    @field_validator("hosts")
    @classmethod
    def _hosts_exist(
        cls, value: Literal["all"] | tuple[int, ...], info: ValidationInfo
    ) -> Literal["all"] | tuple[int, ...]:
        if value != "all" and "accelerator" in info.data:
            zone_checks.check_hosts(info.data["accelerator"], value)
        return value

    @field_validator("secrets")
    @classmethod
    def _not_in_the_open(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        shared = [
            ((i,), f"{name} stands in environment too; keep it in one of them")
            for i, name in enumerate(value)
            if name in info.data.get("environment", {})
        ]
        if shared:
            raise Wrong.all_of(shared)
        return value

"""The keys of a job file, with their types, descriptions and examples.

docs/build_jobs.py generates docs/jobs.md from the descriptions and examples. Validation uses only
the values, so JSON from `model_dump(mode="json")` can be read on any machine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drumline.hosts.environment import SERVICE_ACCOUNT, is_google_registry, registry_of
from drumline.jobs.slice_settings import SliceSettings
from drumline.jobs.spec import checks, slice_checks
from drumline.jobs.spec import zones as zone_checks
from drumline.jobs.spec.checks import InvalidValue, quoted, unique
from drumline.jobs.spec.yaml_lines import KeyPath

"""Seconds that a cancelled job keeps its slice: enough to fix a bug, and a small bill."""

Allowance = Annotated[int | Literal["unlimited"], BeforeValidator(checks.allowance)]


def _optional(check: Callable[[object], Any]) -> BeforeValidator:
    """Return a validator for a key that may be empty."""
    return BeforeValidator(lambda value: None if value is None else check(value))


def _check_drumline(value: object) -> bool | str:
    if value is None or value == "auto":
        return "auto"
    if isinstance(flag := checks.unwrap(value), bool):
        return flag
    raise InvalidValue(f"is {quoted(value)}; expected auto, true or false")


class Python(BaseModel):
    """The Python environment of the program."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[
        Literal["system", "uv", "venv", "conda", "docker"],
        BeforeValidator(lambda value: checks.choice(value, checks.PYTHON_KINDS)),
    ] = Field(
        description="`system` (the Python of the host), `uv`, `venv`, `conda` or `docker`.",
        examples=["uv"],
    )
    version: Annotated[str | None, _optional(checks.version)] = Field(
        default=None,
        description="The version of Python, for `uv`, `venv` and `conda`.",
        examples=["3.12"],
    )
    requirements: Annotated[str | tuple[str, ...] | None, _optional(checks.requirements)] = Field(
        default=None,
        description="The packages to install: a requirements file in `workdir`, or a list.",
        examples=["requirements.txt", ["jax[tpu]==0.10.0", "optax"]],
    )
    image: Annotated[str | None, _optional(checks.image)] = Field(
        default=None,
        description="The container image. Required for `docker`.",
        examples=["python:3.12-slim"],
    )
    drumline: Annotated[bool | Literal["auto"], BeforeValidator(_check_drumline)] = Field(
        default="auto",
        description="Send the Drumline package of this machine to the hosts: `true` always, "
        "`false` never, `auto` if the code imports `drumline` and does not include it.",
        examples=[True],
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        errors: list[tuple[KeyPath, str]] = []
        if self.kind == "docker" and self.image is None:
            errors.append((("image",), "is missing; docker requires one, like python:3.12-slim"))
        if self.kind != "docker" and self.image is not None:
            errors.append(
                (("image",), f"is not supported with {self.kind}; only docker uses an image")
            )
        if self.kind in {"system", "docker"} and self.version is not None:
            provider = "the image" if self.kind == "docker" else "the host"
            message = f"is set by {provider}; only uv, venv and conda take a version"
            errors.append((("version",), message))
        if errors:
            raise InvalidValue.from_errors(errors)
        return self


class Docker(BaseModel):
    """The container of the program."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Annotated[str, BeforeValidator(checks.image)] = Field(
        description="The container image.",
        examples=["us-docker.pkg.dev/lab-tpu-1/images/llama:v3"],
    )
    login: Annotated[str | None, _optional(checks.registry_login)] = Field(
        default=None,
        description="The login to a private registry: `service-account` for the account of the "
        "hosts, with images of Artifact Registry, or one of the `secrets`, whose value is "
        "`USER:PASSWORD` or the JSON key of a service account. Without it, a private image of "
        "Artifact Registry or gcr.io is pulled with the account of the hosts, too.",
        examples=["service-account"],
    )
    shm_size: Annotated[str, BeforeValidator(checks.memory_size)] = Field(
        default="16g",
        description="The size of `/dev/shm` in the container, as docker writes it.",
        examples=["64g"],
    )

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        registry = registry_of(self.image)
        if self.login == SERVICE_ACCOUNT and not is_google_registry(registry):
            raise InvalidValue(
                f"logs in to Artifact Registry only, and {quoted(self.image)} is not there; "
                "name a secret with USER:PASSWORD",
                "login",
            )
        return self


class Retry(BaseModel):
    """The number of failures of each kind that a job survives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failures: Allowance = Field(
        default=3,
        description="Failures of your program or setup, including a program that is stuck.",
        examples=[1],
    )
    bad_hosts: Allowance = Field(
        default=10, description="Slices released because of a bad host.", examples=[20]
    )
    preemptions: Allowance = Field(
        default="unlimited", description="Slices preempted by the cloud.", examples=[100]
    )


class AccountKeys(BaseModel):
    """The service account of the hosts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    email: Annotated[str | None, _optional(slice_checks.email)] = Field(
        default=None,
        description="The e-mail address of the account. Without it, the Compute Engine default "
        "account of the project.",
        examples=["trainer@lab-tpu-1.iam.gserviceaccount.com"],
    )
    scopes: Annotated[tuple[str, ...], BeforeValidator(slice_checks.scopes)] = Field(
        default=(),
        description="Access scopes: URLs, or the aliases `cloud-platform`, `storage-ro`, "
        "`storage-rw`, `storage-full`, `logging-write`, `monitoring-write`. Without them, all.",
        examples=[["storage-rw", "logging-write"]],
    )


class SshOptions(BaseModel):
    """The way to connect to the hosts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    proxy_command: Annotated[str | None, _optional(slice_checks.proxy_command)] = Field(
        default=None,
        description="A command whose input and output are the connection to the SSH port of a "
        "host, for the server and for `ssh`, `cp` and `exec`. `%h` is the address of the host, "
        "`%p` its port, `%i` its index, `%n` the name of its instance, `%z` the zone, and `%%` a "
        "percent sign. No shell runs it. `none` connects directly. See [No external "
        "addresses](google-cloud.md#no-external-addresses).",
        examples=["gcloud compute start-iap-tunnel %n %p --listen-on-stdin --zone %z"],
    )


class DiskKeys(BaseModel):
    """A disk that is attached to every host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, BeforeValidator(slice_checks.disk_source)] = Field(
        description="The name of a disk in the zone of the slice, or its path.",
        examples=["imagenet", "projects/lab-data/zones/us-central2-b/disks/imagenet"],
    )
    mode: Annotated[Literal["read-only", "read-write"], BeforeValidator(slice_checks.disk_mode)] = (
        Field(
            default="read-write",
            description="`read-write`, or `read-only`, which slices of several hosts require.",
            examples=["read-only"],
        )
    )


def _python(value: object) -> object:
    if value is None or isinstance(value, str):
        return {"kind": value or "system"}
    if isinstance(checks.unwrap(value), int | float):
        raise InvalidValue(f"is {quoted(value)}; write {{kind: uv, version: {quoted(value)}}}")
    return value if isinstance(value, Python) else checks.map_of(value, "kind: uv")


def _retry(value: object) -> object:
    return value if isinstance(value, Retry) else checks.map_of(value, "failures: 1")


def _keys_of(model: type[BaseModel], check: Callable[[object], object]) -> Callable[[object], Any]:
    """Return a check of a map with the keys of a model."""
    return lambda value: value if isinstance(value, model) else check(value)


def _workdir(value: object) -> Path | None:
    if value is None or value == "none":
        return None
    path = Path(value if isinstance(value, Path) else checks.text(value))
    if not path.is_absolute():
        raise InvalidValue(f"{quoted(path)} is not an absolute path")
    return path


class JobSpec(BaseModel):
    """A job file with all defaults filled in and all names in canonical form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, BeforeValidator(checks.line_of_text)] = Field(
        default="job",
        description="The name of the job in lists. Default: the file name without its extension.",
        examples=["llama-1b"],
    )
    accelerator: Annotated[tuple[str, ...], BeforeValidator(zone_checks.accelerators)] = Field(
        description="The slice type. A list is in order of preference.",
        examples=["v4-128", ["v4-128", "v5litepod-64"]],
    )
    zones: Literal["any"] | tuple[str, ...] = Field(
        default="any",
        description="The zones to try, in order of preference, or `any` for all zones with the "
        "accelerator. Default: `any`.",
        examples=["any", ["us-central2-b", "europe-west4-b"]],
    )
    ask: Annotated[int, BeforeValidator(checks.ask)] = Field(
        default=3,
        description="The number of zones to request a slice in at the same time. The first slice "
        "whose hosts answer runs the job, and the other requests are deleted. If a slice that "
        "costs at least a tenth less is booting, the job waits up to a minute for it. A slice that "
        "was granted too late costs what it costs until it is deleted, usually a few minutes. `1` "
        "requests in one zone after the other. Default: `3`.",
        examples=[1],
    )
    migrate: Annotated[
        Literal["never", "cheaper"],
        BeforeValidator(lambda value: checks.choice(value, ("never", "cheaper"))),
    ] = Field(
        default="never",
        description="`cheaper` moves the job when a slice that costs at least a tenth less is "
        "ready: half an hour after its start the job requests slices in cheaper zones, and the "
        "program is stopped as by a preemption and continues there. Default: `never`, which leaves "
        "no healthy slice.",
        examples=["cheaper"],
    )
    capacity: Annotated[
        Literal["spot", "on-demand", "reserved"],
        BeforeValidator(
            lambda value: checks.choice(
                value, checks.CAPACITY_TIERS, {"preemptible": "spot", "ondemand": "on-demand"}
            )
        ),
    ] = Field(
        default="spot",
        description="The capacity tier. `spot` costs least and can be preempted at any time; "
        "`on-demand` and `reserved` are not preempted. Default: `spot`.",
        examples=["on-demand"],
    )
    reservation: Annotated[str | None, _optional(slice_checks.reservation)] = Field(
        default=None,
        description="The reservation that provides the slice, with `capacity: reserved`: its "
        "name, its path, or `-` for any reservation of the project. Default: `-`.",
        examples=["team-a", "projects/lab-shared/locations/us-central2-b/reservations/team-a"],
    )
    workdir: Annotated[Path | None, BeforeValidator(_workdir)] = Field(
        default=None,
        description="The folder with your code, relative to the job file. Drumline sends it to "
        "every host, without ignored files and secrets (see [Files sent to the "
        "hosts](#files-sent-to-the-hosts)). `none` sends no code. Default: the folder of the job "
        "file.",
        examples=["../llama", "none"],
    )
    include: Annotated[tuple[str, ...], BeforeValidator(checks.include)] = Field(
        default=(),
        description="Files in `workdir` to send even if they look like secrets or only you can "
        "read them (see [Files sent to the hosts](#files-sent-to-the-hosts)). Name a key or "
        "password file by its path. A `.gitignore` pattern only matches files that are left out "
        "because of their permissions. The home folder of Drumline is never sent.",
        examples=[["deploy/test_key.pem"], ["*.py", "configs/"]],
    )
    setup: Annotated[str | None, _optional(checks.script)] = Field(
        default=None,
        description="Shell commands that run once on every new host, in `workdir`, before `run`.",
        examples=["sudo apt-get install -y libsndfile1\n"],
    )
    environment: Annotated[dict[str, str], BeforeValidator(checks.environment)] = Field(
        default_factory=dict,
        description="Environment variables for `setup` and `run`. Numbers and booleans keep "
        "their spelling.",
        examples=[{"LEARNING_RATE": "3e-4", "XLA_FLAGS": "--xla_dump_to=/tmp/xla"}],
    )
    secrets: Annotated[tuple[str, ...], BeforeValidator(checks.secrets)] = Field(
        default=(),
        description="Names of environment variables whose values `create` reads from your shell. "
        "The values are stored only in a private file, which is deleted when the job ends.",
        examples=[["HF_TOKEN", "WANDB_API_KEY"]],
    )
    docker: Annotated[Docker | None, _optional(_keys_of(Docker, checks.container))] = Field(
        default=None,
        description="The container of the program: an image, or a map with the following keys. "
        "The same as `python: {kind: docker, image: …}`, with a login and the size of `/dev/shm`.",
        examples=[
            "python:3.12-slim",
            {"image": "us-docker.pkg.dev/lab-tpu-1/images/llama:v3", "login": "service-account"},
        ],
    )
    python: Annotated[Python, BeforeValidator(_python)] = Field(
        default=Python(kind="system"),
        validate_default=True,
        description="The Python environment: a kind, or a map with the following keys. "
        "Default: `system`.",
        examples=["uv", {"kind": "docker", "image": "python:3.12-slim"}],
    )
    mounts: Annotated[dict[str, str], BeforeValidator(checks.mounts)] = Field(
        default_factory=dict,
        description="Folders on the hosts, each with the bucket to mount there. The bucket must "
        "be in the region of the slice.",
        examples=[{"/data": "gs://lab-data-us-central2/c4"}],
    )
    run: Annotated[str, BeforeValidator(checks.script)] = Field(
        description="The program: shell commands that run on every host, in `workdir`, with "
        "`bash -eo pipefail`. The first command that fails ends the program.",
        examples=["python train.py --config llama_1b"],
    )
    hosts: Annotated[Literal["all"] | tuple[int, ...], BeforeValidator(checks.hosts)] = Field(
        default="all",
        description="The hosts that run the program, by index from 0. Default: `all`.",
        examples=[[0]],
    )
    checkpoint: Annotated[str | None, _optional(checks.checkpoint)] = Field(
        default=None,
        description="The location for checkpoints: a folder in a bucket, or a folder on the "
        "hosts. Each job gets its own subfolder, whose name ends with the number of the "
        "job. On Google Cloud, a folder on the hosts must be below a mount. With the emulator, a "
        "relative folder is relative to the job file.",
        examples=["gs://lab-data-us-central2/checkpoints"],
    )
    outputs: Annotated[tuple[str, ...], BeforeValidator(checks.outputs)] = Field(
        default=(),
        description="Files that the program writes, to be copied to the machine of the server: "
        "files, folders and patterns in the folder of the program. `*` matches part of a name, "
        "and `**` any number of folders. They are copied while the program runs, and when the job "
        "ends, is stopped or fails (see [Outputs](#outputs)).",
        examples=[["results/", "*.png"]],
    )
    retry: Annotated[Retry, BeforeValidator(_retry)] = Field(
        default=Retry(),
        description="The number of failures of each kind that the job survives: a number from "
        "0, or `unlimited`.",
        examples=[{"failures": 1, "bad_hosts": 20}],
    )
    burnin: Annotated[Literal["off", "short", "long"], BeforeValidator(checks.burnin)] = Field(
        default="off",
        description="Test the chips of every new slice before `run`. `short` takes half a "
        "minute and `long` three minutes, most of it compilation. A slice that fails is released "
        "and its host recorded in the [host history](health.md#host-history). A host "
        "with findings in its history is always tested. Default: `off`.",
        examples=["short"],
    )
    parking: Annotated[int | None, _optional(checks.parking)] = Field(
        default=None,
        description="The number of slices with a bad host to hold back, at your cost, so that "
        "the cloud cannot assign them again. They are released when the program runs, when no "
        "other slice is available, or when the job still waits for another slice to be deleted "
        "half an hour after they were granted. `0` releases all at once. Default: one slice for "
        "every three in a row that are rejected for an excluded host, at most 4.",
        examples=[1],
    )
    project: Annotated[str | None, _optional(checks.project)] = Field(
        default=None,
        description="The Google Cloud project. Default: the project of `drumline init`.",
        examples=["lab-tpu-1"],
    )
    network: Annotated[str | None, _optional(slice_checks.network)] = Field(
        default=None,
        description="The VPC network of the hosts: its name, or its path. Default: `default`. "
        "This key and the next six can also be set for all jobs (see [Settings for all "
        "jobs](google-cloud.md#settings-for-all-jobs)).",
        examples=["lab", "projects/lab-shared/global/networks/lab"],
    )
    subnetwork: Annotated[str | None, _optional(slice_checks.subnetwork)] = Field(
        default=None,
        description="The subnetwork of the hosts: its name, or its path.",
        examples=["tpus", "projects/lab-shared/regions/us-central2/subnetworks/tpus"],
    )
    external_ip: Annotated[bool | None, _optional(checks.boolean)] = Field(
        default=None,
        description="`false` gives the hosts internal addresses only, to which Drumline then "
        "connects (see [No external addresses](google-cloud.md#no-external-addresses)). Default: "
        "`true`.",
        examples=[False],
    )
    tags: Annotated[tuple[str, ...] | None, _optional(slice_checks.tags)] = Field(
        default=None,
        description="Network tags of the hosts, for firewall rules.",
        examples=[["allow-ssh"]],
    )
    service_account: Annotated[
        AccountKeys | None, _optional(_keys_of(AccountKeys, slice_checks.service_account))
    ] = Field(
        default=None,
        description="The service account of the hosts: its e-mail address, or a map with the "
        "following keys. Default: the Compute Engine default account, with all scopes.",
        examples=[
            "trainer@lab-tpu-1.iam.gserviceaccount.com",
            {"email": "trainer@lab-tpu-1.iam.gserviceaccount.com", "scopes": ["storage-rw"]},
        ],
    )
    labels: Annotated[dict[str, str], BeforeValidator(slice_checks.labels)] = Field(
        default_factory=dict,
        description="Labels of the slices, such as those that your billing reports use. Drumline "
        "adds its own labels.",
        examples=[{"team": "vision", "cost-centre": "4711"}],
    )
    ssh: Annotated[SshOptions | None, _optional(_keys_of(SshOptions, slice_checks.ssh))] = Field(
        default=None,
        description="The way to connect to the hosts, if this machine cannot reach their "
        "addresses.",
        examples=[{"proxy_command": "ssh -W %h:%p bastion.example.org"}],
    )
    data_disks: Annotated[tuple[DiskKeys, ...], BeforeValidator(slice_checks.data_disks)] = Field(
        default=(),
        description="Existing disks to attach to every host: names or paths, or maps with the "
        "following keys. Drumline does not mount them; `setup` can.",
        examples=[[{"source": "imagenet", "mode": "read-only"}]],
    )
    allow_cross_region: Annotated[bool, BeforeValidator(checks.boolean)] = Field(
        default=False,
        description="Allow buckets in another region than the slice. Google Cloud charges for "
        "each gigabyte that crosses regions. Default: `false`.",
        examples=[True],
    )
    stop_grace: Annotated[float, BeforeValidator(checks.grace)] = Field(
        default=30.0,
        description="The time between SIGTERM and SIGKILL when Drumline stops the program: "
        "seconds, or `30s`, `2m`. Default: `30`.",
        examples=["2m"],
    )
    keep: Annotated[float | None, _optional(checks.keep)] = Field(
        default=None,
        description="The time that a cancelled or failed job keeps its slice for a `resume`, at "
        "your cost: seconds, `30m`, `2h`; `0` releases it at once. A slice with a bad host, or on "
        "which the program may still run, is not kept. Default: `1h` after `cancel`, `5m` after a "
        "failure.",
        examples=["10m"],
    )
    progress: Annotated[str | None, _optional(checks.progress)] = Field(
        default=None,
        description="A regular expression that finds the step in the log, for programs without a "
        "heartbeat. It needs a group `step`; other groups (`loss`, `total`, `rate`) are shown and "
        "plotted like metrics of a heartbeat. An expression that is too slow is rejected, and "
        "one that takes too long to match a line of the log is disabled.",
        examples=[r"step (?P<step>\d+)", r"completed step: (?P<step>\d+), .*loss: (?P<loss>\S+)"],
    )
    stuck_after: Annotated[float | Literal["never"], BeforeValidator(checks.stuck_after)] = Field(
        default=1800.0,
        description="The time without a new step after which Drumline restarts the program: "
        "seconds, `30m`, `2h`, or `never`. The first step of an attempt and the last step may take "
        "three times as long. Programs that have reported no step are not restarted. Default: "
        "`30m`.",
        examples=["10m", "never"],
    )

    @property
    def slice_settings(self) -> SliceSettings:
        """The settings of the slices, without those of config.yaml."""
        settings: SliceSettings = _SETTINGS.validate_python(self.model_dump(mode="json"))
        return settings

    @field_validator("zones", mode="before")
    @classmethod
    def _check_zones(cls, value: object, info: ValidationInfo) -> object:
        return zone_checks.zones(value, info.data.get("accelerator"))

    @field_validator("docker")
    @classmethod
    def _check_login(cls, value: Docker | None, info: ValidationInfo) -> Docker | None:
        secrets = info.data.get("secrets")
        if value is None or secrets is None:
            return value
        if value.login not in {None, SERVICE_ACCOUNT, *secrets}:
            raise InvalidValue(
                f"{quoted(value.login)} is not one of the secrets; add it to secrets, "
                f"or write {SERVICE_ACCOUNT}",
                "login",
            )
        return value

    @field_validator("python", mode="before")
    @classmethod
    def _allow_short_form(cls, value: object, info: ValidationInfo) -> object:
        return None if value == "docker" and info.data.get("docker") else value

    @field_validator("python")
    @classmethod
    def _use_container(cls, value: Python, info: ValidationInfo) -> Python:
        """Return the environment of `docker` if that key is set."""
        docker = info.data.get("docker")
        if docker is None:
            return value
        if value.kind not in {"system", "docker"}:
            raise InvalidValue(f"{value.kind} cannot be combined with docker; remove one of them")
        if value.requirements:
            raise InvalidValue(
                "cannot be combined with docker; add the packages to the image", "requirements"
            )
        if value.image not in {None, docker.image}:
            raise InvalidValue(
                f"{quoted(value.image)} is not the image of docker; remove it", "image"
            )
        return Python(kind="docker", image=docker.image, drumline=value.drumline)

    @field_validator("reservation")
    @classmethod
    def _check_reservation(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("capacity", "reserved") != "reserved":
            raise InvalidValue("requires capacity: reserved; add it, or remove this key")
        return value

    @field_validator("data_disks")
    @classmethod
    def _check_disks(
        cls, value: tuple[DiskKeys, ...], info: ValidationInfo
    ) -> tuple[DiskKeys, ...]:
        unique([disk.source for disk in value])
        zone_checks.check_disk_modes(
            info.data.get("accelerator", ()), [disk.mode for disk in value]
        )
        return value

    @field_validator("hosts")
    @classmethod
    def _check_hosts(
        cls, value: Literal["all"] | tuple[int, ...], info: ValidationInfo
    ) -> Literal["all"] | tuple[int, ...]:
        if value != "all" and "accelerator" in info.data:
            zone_checks.check_hosts(info.data["accelerator"], value)
        return value

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        duplicates: list[tuple[KeyPath, str]] = [
            ((index,), f"{name} is in environment too; remove it from one of them")
            for index, name in enumerate(value)
            if name in info.data.get("environment", {})
        ]
        if duplicates:
            raise InvalidValue.from_errors(duplicates)
        return value


_SETTINGS: TypeAdapter[Any] = TypeAdapter(SliceSettings)
SUBMODELS: Mapping[str, type[BaseModel]] = {
    "python": Python,
    "docker": Docker,
    "retry": Retry,
    "service_account": AccountKeys,
    "ssh": SshOptions,
    "data_disks": DiskKeys,
}
"""The model of each key whose value is a map with fixed keys, or a list of them."""

"""Invalid job files, each with the full error message."""

from pathlib import Path

import pytest

from drumline.jobs.spec import SpecError, load, parse

GOOD = "accelerator: v4-8\nrun: python train.py\n"
V4_SIZES = "8, 16, 32, 64, 128, 256, 384, 512, …, 6144"
VARIABLE = "is not a variable name; use letters, digits and _, and do not start with a digit"
ALLOWANCE = "expected a whole number from 0, or unlimited"
NAME = "use lower-case letters, digits and hyphens, and start with a letter"
BUCKET = "use lower-case letters, digits, - _ and ., with a letter or digit at both ends"

# The text of the file → the lines of the message after `job.yaml`. ONE_KEY is line 3, after GOOD.
WHOLE_FILES: dict[str, str] = {
    "": "  is empty; it needs accelerator and run",
    "# nothing but words\n": "  is empty; it needs accelerator and run",
    "{}": "  accelerator: is missing; name a slice, like v4-8\n"
    "  run: is missing; write a command, like python train.py",
    "- v4-8\n": ":1  is a list; a job file has keys, like accelerator: v4-8",
    "python train.py\n": ":1  is not a map; a job file has keys, like accelerator: v4-8",
    "accelerator: v4-8\n": "  run: is missing; write a command, like python train.py",
    "run: x\n": "  accelerator: is missing; name a slice, like v4-8",
    "accelerator: v4-8\n\trun: x\n": ":2  a tab cannot indent YAML; use spaces",
    "accelerator: [v4-8\nrun: x\n": ":1  not valid YAML: a '[' is never closed",
    "run: 'x\naccelerator: v4-8\n": ":1  not valid YAML: a quote is never closed",
    "name: a\nrun: echo a: b\n": ":2  not valid YAML: unexpected colon; "
    "check the indentation, or quote the text",
    "run: @x\n": ":1  not valid YAML: text cannot start with @; put it in quotes",
    "run: *x\n": ":1  not valid YAML: undefined alias 'x'; put text that starts with * in quotes",
    "- a\nb: 1\n": ":2  not valid YAML: the indentation does not match the lines above",
    "a: &x 1\nb: &x 2\n": ":2  not valid YAML: an anchor is defined twice",
    "a: 1\n---\nb: 2\n": ":2  contains more than one YAML document; write one job per file",
    "name: \x07\n": ":1  contains the control character 0x7",
    'name: "\\UFFFFFFFF"\n': "  is not valid YAML",
    "a: x\n...\nb: y\n": ":3  not valid YAML: there is text after the end of the document",
    "- a\n" * 50_000: "  has more than 20,000 values",
    "[" * 5000: ":1  has more than 20 levels",
    "a: &a [*a]": ":1  an alias refers to a value that contains it",
    "x: '" + "x" * 1_000_000 + "'": "  is larger than 1 MB; "
    "put data in files in workdir or in a bucket",
    "accelerator: 8\nrun: x": ":1  accelerator: 8 is not a slice; example: v4-8",
    "accelerator:\nrun: x": ":1  accelerator: has no value; write one after the colon",
    "accelerator: []\nrun: x": ":1  accelerator: is an empty list",
    "accelerator: {a: 1}\nrun: x": ":1  accelerator: is a map; expected one name or a list",
    "accelerator: v4-12\nrun: x": f":1  accelerator: 'v4-12': v4 comes in {V4_SIZES}; "
    "nearest: v4-8, v4-16",
    "accelerator: v4\nrun: x": ":1  accelerator: 'v4' does not end in the size of a slice; "
    f"v4 comes in {V4_SIZES}",
    "accelerator: H100-8\nrun: x": ":1  accelerator: 'H100-8' names a GPU; only TPUs have slices: "
    "v2, v3, v4, v5litepod, v5p, v6e, tpu7x",
    "accelerator:\n  - v4-8\n  - v9-8\nrun: x": ":3  accelerator: 'v9-8' starts with no TPU "
    "generation; the generations are v2, v3, v4, v5litepod, v5p, v6e, tpu7x; nearest: v4, v3, v2",
    "accelerator: [v5e-16, v5litepod-16]\nrun: x": ":1  accelerator: v5litepod-16 is listed twice",
    "accelerator: tpu7x-64\nrun: x": ":1  accelerator: tpu7x-64 is only available on GKE, "
    "not through the Cloud TPU API",
    "accelerator: v2-32\nrun: x\nzones: us-central1-b": ":3  zones: us-central1-b has no v2-32; "
    "zones with it: us-central1-a, europe-west4-a",
    "accelerator: [v4-8, v2-32]\nrun: x\nzones: us-west4-a": ":3  zones: us-west4-a has no v4 or "
    "v2; zones with v4-8: us-central2-b; zones with v2-32: us-central1-a, europe-west4-a",
    "accelerator: v5e-16\nrun: x\nzones: us-central2-b": ":3  zones: us-central2-b has no v5e; "
    "zones with it: us-central1-a, us-south1-a, us-west1-c, us-west4-a, europe-west4-b, "
    "asia-southeast1-b, … (all: drumline chips v5litepod-16)",
    "accelerator: nothing\nrun: x\nzones: us-central2": ":1  accelerator: 'nothing' starts with "
    "no TPU generation; the generations are v2, v3, v4, v5litepod, v5p, v6e, tpu7x\n"
    ":3  zones: 'us-central2' is a region; its zones: us-central2-b",
    "accelerator: v4-8\nrun: '  '": ":2  run: is empty",
    "accelerator: v4-8\nrun:": ":2  run: has no value; write one after the colon",
    "accelerator: v4-8\nrun: yes": ":2  run: YAML reads yes as true; put it in quotes: 'yes'",
    "accelerator: v4-8\nrun: [python, train.py]": ":2  run: is a list; "
    "write the commands line by line below a |",
}
ONE_KEY: dict[str, str] = {
    "name: no": "name: YAML reads no as false; put it in quotes: 'no'",
    "name: 2024": "name: 2024 is a number, not text; put it in quotes: '2024'",
    "name: ''": "name: is empty",
    'name: "a\\nb"': "name: 'a\\nb' contains a line break or an unprintable character",
    'name: "a\\0b"': "name: contains a character that is not valid in text",
    'name: "\\ud800"': "name: contains a character that is not valid in text",
    "name: !!python/object/apply:os.system [ls]": "name: the tag "
    "!!python/object/apply:os.system is not allowed; remove it",
    "zones: us-central2": "zones: 'us-central2' is a region; its zones with v4: us-central2-b",
    "zones: us-east1": "zones: 'us-east1' is a region without v4; zones with it: us-central2-b",
    "zones: us-east1-d": "zones: us-east1-d has no v4; zones with it: us-central2-b",
    "zones: [us-central2-b, mars]": "zones: 'mars' is not a zone; example: us-central2-b",
    "zones: [any, us-central2-b]": "zones: any cannot be combined with zones; write zones: any",
    "zones: 7": "zones: 7 is not a zone; example: us-central2-b",
    "capacity: preemptible": "capacity: 'preemptible' is not one of spot, on-demand, reserved; "
    "did you mean spot?",
    "capacity: true": "capacity: true is not one of spot, on-demand, reserved",
    "workdir: nowhere": "workdir: 'nowhere' does not exist",
    "workdir: notes.txt": "workdir: 'notes.txt' is a file; workdir is a folder",
    "workdir: ~": "workdir: YAML reads ~ as no value; write none, or the full path",
    "setup: [a, b]": "setup: is a list; write the commands line by line below a |",
    "environment: [A=1]": "environment: is a list; expected a map, like LEARNING_RATE: 3e-4",
    "environment: {1A: b}": f"environment.1A: '1A' {VARIABLE}",
    "environment: {B: }": "environment.B: has no value; write '' for an empty one",
    "environment: {DRUMLINE_HOST: 1}": "environment.DRUMLINE_HOST: 'DRUMLINE_HOST': "
    "names that begin with DRUMLINE_ are reserved",
    "secrets: {HF_TOKEN: abc}": "secrets: is a map; list only the names, "
    "values come from your environment",
    "secrets: [HF_TOKEN=abc]": "secrets: contains a value; write only the name 'HF_TOKEN', "
    "the value comes from your environment",
    "secrets: [A, A]": "secrets: A is listed twice",
    "python: pyenv": "python.kind: 'pyenv' is not one of system, uv, venv, conda, docker; "
    "did you mean venv?",
    "python: docker": "python.image: is missing; docker requires one, like python:3.12-slim",
    "python: {kind: uv, image: x}": "python.image: is not supported with uv; "
    "only docker uses an image",
    "python: {version: 3.12}": "python.kind: is missing; "
    "it is one of system, uv, venv, conda, docker",
    "python: {kind: system, version: 3.10}": "python.version: is set by the host; "
    "only uv, venv and conda take a version",
    "python: {kind: uv, requirements: jax}": "python.requirements: 'jax' is not a file in workdir; "
    "for a package write a list: [jax]",
    "python: {kind: uv, requirements: ../r.txt}": "python.requirements: '../r.txt' is not inside "
    "workdir; name a file there, or list the packages",
    "python: 3.12": "python: is 3.12; write {kind: uv, version: 3.12}",
    "docker: {login: service-account}": "docker.image: is missing; name an image, "
    "like python:3.12-slim",
    "docker: {image: a b}": "docker.image: 'a b' is not an image name; example: python:3.12-slim",
    "docker: {image: a/b, login: service-account}": "docker.login: logs in to Artifact Registry "
    "only, and 'a/b' is not there; name a secret with USER:PASSWORD",
    "docker: {image: a/b, login: REGISTRY}": "docker.login: 'REGISTRY' is not one of the secrets; "
    "add it to secrets, or write service-account",
    "docker: {image: a, shm_size: 16}": "docker.shm_size: 16 is a number, not text; "
    "put it in quotes: '16'",
    "docker: {image: a, shm_size: big}": "docker.shm_size: is 'big'; "
    "expected a size with its unit, like 16g or 512m",
    "docker: {image: a, args: --init}": "docker.args: unknown key; the keys are image, login, "
    "shm_size",
    "mounts: gs://lab-data": "mounts: is 'gs://lab-data'; "
    "expected a map, like /data: gs://lab-data",
    "mounts: {data: gs://lab-data}": "mounts data: 'data' is neither absolute nor below ~/",
    "mounts: {/data: lab-data}": "mounts /data: 'lab-data' is not a bucket; write gs://bucket/folder",
    "mounts: {/data: gs://Lab}": f"mounts /data: 'Lab' is not a bucket name: {BUCKET}",
    "mounts: {/data: gs://ab}": "mounts /data: 'ab' is not a bucket name: "
    "it must have 3 to 63 characters",
    "mounts: {/data: gs://10.0.0.1}": "mounts /data: '10.0.0.1' is not a bucket name: "
    "it looks like an IP address",
    "mounts: {/data: gs://my-google-data}": "mounts /data: 'my-google-data' is not a bucket name: "
    "Google reserves names that contain google",
    "mounts: {/data: gs://lab-data/../x}": "mounts /data: 'gs://lab-data/../x' contains an empty "
    "folder name, a folder named . or .., or an unprintable character",
    "mounts: {/: gs://lab-data}": "mounts /: '/' is the root or home folder; "
    "name a folder inside it",
    "mounts: {/d: gs://lab-data, /d/x: gs://lab-x}": "mounts /d/x: is inside the mount /d",
    "hosts: 2": "hosts: 2 could be a host or a number of hosts; write a list: [2]",
    "hosts: [1]": "hosts: v4-8 has no host 1; it has only host 0",
    "hosts: [0, 0]": "hosts: 0 is listed twice",
    "hosts: [-1]": "hosts: -1 is not a host; hosts are numbered from 0",
    "hosts: some": "hosts: is 'some'; expected all, or a list of hosts like [0, 1]",
    "checkpoint: s3://x/y": "checkpoint: 's3://x/y' is not a bucket; write gs://bucket/folder",
    "checkpoint: 5": "checkpoint: 5 is a number, not text; put it in quotes: '5'",
    "retry: 5": "retry: is 5; expected a map, like failures: 1",
    "retry: {failures: -1}": f"retry.failures: is -1; {ALLOWANCE}",
    "retry: {failures: true}": f"retry.failures: is true; {ALLOWANCE}",
    "retry: {failuers: 3}": "retry.failuers: unknown key; did you mean failures?",
    "project: My Project": "project: 'My Project' is not a project id; "
    "it has 6 to 30 lower-case letters, digits and hyphens",
    "allow_cross_region: maybe": "allow_cross_region: is 'maybe'; expected true or false",
    "stop_grace: soon": "stop_grace: is 'soon'; expected seconds, like 30, or 30s, 2m",
    "stop_grace: 99h": "stop_grace: is '99h'; expected 0 s to 1 h",
    "stop_grace: .nan": "stop_grace: is .nan; expected seconds, like 30, or 30s, 2m",
    "progress: '('": "progress: '(' is not a regular expression: "
    "missing ), unterminated subpattern",
    "progress: 'at (.*)'": "progress: 'at (.*)' has no group called step, like (?P<step>\\d+)",
    "chekpoint: /x": "chekpoint: unknown key; did you mean checkpoint?",
    "env: {A: b}": "env: unknown key; did you mean environment?",
    "burnin: thorough": "burnin: 'thorough' is not one of off, short, long",
    "burnin: on": "burnin: on is not one of off, short, long",
    "parking: -1": "parking: is -1; expected a whole number from 0 to 8",
    "parking: 99": "parking: is 99; expected a whole number from 0 to 8",
    "ask: 0": "ask: is 0; expected a whole number from 1 to 8",
    "migrate: always": "migrate: 'always' is not one of never, cheaper",
    "ask: all": "ask: is 'all'; expected a whole number from 1 to 8",
    "reservation: team-a": "reservation: requires capacity: reserved; add it, or remove this key",
    "reservation: Team A": f"reservation: 'Team A' is not the name of a reservation; {NAME}",
    "reservation: a/b": "reservation: 'a/b' is not the path of a reservation; "
    "write projects/P/locations/ZONE/reservations/NAME",
    "network: Lab": f"network: 'Lab' is not the name of a network; {NAME}",
    "network: lab/net": "network: 'lab/net' is not the path of a network; "
    "write projects/P/global/networks/NAME",
    "subnetwork: projects/p/global/networks/lab": "subnetwork: "
    "'projects/p/global/networks/lab' is not the path of a subnetwork; "
    "write projects/P/regions/R/subnetworks/NAME",
    "external_ip: internal": "external_ip: is 'internal'; expected true or false",
    "internal_ips: true": "internal_ips: unknown key; did you mean external_ip?",
    "tags: [ssh, Web]": f"tags: 'Web' is not a network tag; {NAME}",
    "tags: [ssh, ssh]": "tags: ssh is listed twice",
    "service_account: nobody": "service_account.email: 'nobody' is not the e-mail address of a "
    "service account; it looks like NAME@PROJECT.iam.gserviceaccount.com",
    "service_account: {scope: x}": "service_account.scope: unknown key; did you mean scopes?",
    "service_account: {scopes: [drive]}": "service_account.scopes: 'drive' is not a scope; use "
    "cloud-platform, logging-write, monitoring-write, storage-full, storage-ro, storage-rw, "
    "or a URL that starts with https://www.googleapis.com/auth/",
    "labels: [a]": "labels: is a list; expected a map, like team: vision",
    "labels: {Team: vision}": "labels.Team: 'Team' is not a label; use at most 63 lower-case "
    "letters, digits, _ and -, and start with a letter",
    "labels: {team: Computer Vision}": "labels.team: 'Computer Vision' is not a value of a label; "
    "use at most 63 lower-case letters, digits, _ and -",
    "labels: {team: [a]}": "labels.team: is a list; expected text",
    "data_disks: [a, a]": "data_disks: a is listed twice",
    "labels: {drumline-owner: me}": "labels.drumline-owner: 'drumline-owner': "
    "labels that begin with drumline- are reserved",
    "ssh: gcloud": "ssh: is 'gcloud'; expected a map, like proxy_command: ssh -W %h:%p bastion",
    "ssh: {proxy_command: nc %q}": "ssh.proxy_command: %q is not known; use "
    "%h (the address of the host), %p (its SSH port), %i (its index in the slice, from 0), "
    "%n (the name of its instance), %z (the zone), %% (a percent sign)",
    'ssh: {proxy_command: "nc \'%h"}': 'ssh.proxy_command: "nc \'%h" has a quote that is never '
    "closed",
    "ssh: {proxy: nc}": "ssh.proxy: unknown key; did you mean proxy_command?",
    "data_disks: [7]": "data_disks: is 7; write {source: NAME, mode: read-only}",
    "data_disks: [{mode: read-only}]": "data_disks.source: is missing; name a disk, like imagenet",
    "data_disks: [{source: imagenet, mode: ro}]": "data_disks.mode: 'ro' is not one of read-only, "
    "read-write; did you mean read-only?",
    "data_disks: [zones/a/disks/b]": "data_disks.source: 'zones/a/disks/b' is not the path of a "
    "disk; write projects/P/zones/ZONE/disks/NAME",
    "frobnicate: 1": "frobnicate: unknown key; the keys are name, accelerator, zones, ask, "
    "migrate, "
    "capacity, "
    "reservation, workdir, include, setup, environment, secrets, docker, python, mounts, run, "
    "hosts, checkpoint, outputs, retry, burnin, parking, project, network, subnetwork, "
    "external_ip, tags, service_account, labels, ssh, data_disks, allow_cross_region, stop_grace, "
    "keep, progress, stuck_after",
    "<<: {a: b}": "<< is not supported; write the keys out",
    "? [a]\n: b": "a key must be text",
    "run: again": "run: is a duplicate; the key is first set in line 2",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("a file")
    return tmp_path


def error_of(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text, source="job.yaml", folder=folder, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("text", WHOLE_FILES, ids=lambda text: repr(text[:40]))
def test_an_invalid_file_is_reported(text: str, folder: Path) -> None:
    expected = [f"job.yaml{line}" for line in WHOLE_FILES[text].split("\n")]
    assert error_of(text, folder).split("\n") == expected


@pytest.mark.parametrize("text", ONE_KEY)
def test_an_invalid_value_is_reported_with_its_line(text: str, folder: Path) -> None:
    assert error_of(GOOD + text, folder) == f"job.yaml:3  {ONE_KEY[text]}"


def test_all_errors_are_reported_in_the_order_of_the_file(folder: Path) -> None:
    text = (
        "name: llama\naccelerator: v4-128\nrun: python train.py\nzones: us-central2\n"
        "retry:\n  failures: many\nchekpoint: /x\nhosts:\n  - 0\n  - 99\n"
        "environment:\n  GOOD: 1\n  BAD: [1]\n  'TWO WORDS': x\n"
    )
    assert error_of(text, folder) == (
        "job.yaml:4  zones: 'us-central2' is a region; its zones with v4: us-central2-b\n"
        f"job.yaml:6  retry.failures: is 'many'; {ALLOWANCE}\n"
        "job.yaml:7  chekpoint: unknown key; did you mean checkpoint?\n"
        "job.yaml:10  hosts: v4-128 has no host 99; it has hosts 0 to 15\n"
        "job.yaml:13  environment.BAD: is a list; expected text\n"
        f"job.yaml:14  environment.TWO WORDS: 'TWO WORDS' {VARIABLE}"
    )


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("uv", "python: uv cannot be combined with docker; remove one of them"),
        ("{kind: docker, image: b}", "python.image: 'b' is not the image of docker; remove it"),
        (
            "{kind: system, requirements: [jax]}",
            "python.requirements: cannot be combined with docker; add the packages to the image",
        ),
    ],
)
def test_a_container_is_the_only_python_of_a_job(folder: Path, python: str, message: str) -> None:
    text = f"{GOOD}docker: {{image: a}}\npython: {python}\n"
    assert error_of(text, folder) == f"job.yaml:4  {message}"


def test_hosts_can_only_share_a_disk_that_none_of_them_writes(folder: Path) -> None:
    text = "accelerator: v4-16\nrun: x\ndata_disks:\n  - source: imagenet\n"
    assert error_of(text, folder) == (
        "job.yaml:4  data_disks: v4-16 has 2 hosts, which can only share a disk that is attached "
        "with mode: read-only"
    )
    assert parse(f"{text}    mode: read-only\n", source="job.yaml", folder=folder)


def test_the_number_of_mounts_is_limited(folder: Path) -> None:
    mounts = "".join(f"  /m{n}: gs://lab-data\n" for n in range(51))
    expected = "job.yaml:3  mounts: has 51 mounts; the maximum is 50"
    assert error_of(f"{GOOD}mounts:\n{mounts}", folder) == expected


def test_problems_have_fields(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse(GOOD + "retry: {failures: -1}", source="job.yaml", folder=folder)
    (problem,) = caught.value.problems
    assert (problem.source, problem.line, problem.key) == ("job.yaml", 3, "retry.failures")
    assert problem.message == f"is -1; {ALLOWANCE}"


def test_a_secret_cannot_be_in_environment(folder: Path) -> None:
    text = GOOD + "environment: {HF_TOKEN: abc}\nsecrets: [HF_TOKEN]"
    expected = "job.yaml:4  secrets: HF_TOKEN is in environment too; remove it from one of them"
    assert error_of(text, folder) == expected


def test_a_requirements_file_needs_a_workdir(folder: Path) -> None:
    text = GOOD + "python: {kind: uv, requirements: r.txt}\nworkdir: none"
    assert error_of(text, folder) == (
        "job.yaml:3  python.requirements: 'r.txt' is a file in workdir, which is none; "
        "list the packages instead"
    )


def test_an_alias_bomb_is_rejected(folder: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert error_of("\n".join(levels), folder).endswith(
        "has more than 20,000 values after its aliases are expanded"
    )


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    def load_error(path: Path) -> str:
        with pytest.raises(SpecError) as caught:
            load(path)
        return str(caught.value)

    assert load_error(tmp_path / "gone.yaml") == f"{tmp_path}/gone.yaml  the file does not exist"
    assert load_error(tmp_path) == f"{tmp_path}  is a folder; name the job file in it"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"accelerator: v4-8\nname: caf\xe9\n")
    assert load_error(latin) == f"{latin}:2  is not UTF-8 text; save the job file as UTF-8"
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    assert load_error(large).endswith(
        "is larger than 1 MB; put data in files in workdir or in a bucket"
    )
    below_a_file = latin / "job.yaml"
    assert load_error(below_a_file) == f"{below_a_file}  cannot be read: Not a directory"

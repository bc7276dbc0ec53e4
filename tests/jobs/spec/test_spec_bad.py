"""Bad job files, each with the whole of what the user reads."""

from pathlib import Path

import pytest

from drumline.jobs.spec import SpecError, load, parse

GOOD = "accelerator: v4-8\nrun: python train.py\n"
V4_SIZES = "8, 16, 32, 64, 128, 256, 384, 512, …, 6144"
VARIABLE = "is no name for a variable; letters, digits and _ make one, no digit first"
ALLOWANCE = "it takes a whole number from 0 on, or unlimited"
BUCKET = "lower-case letters, digits, - _ and . make one, a letter or digit at either end"

# What the file says → the lines after `job.yaml`. Where GOOD comes first, the case is line 3.
WHOLE_FILES: dict[str, str] = {
    "": "  is empty; it needs accelerator and run",
    "# nothing but words\n": "  is empty; it needs accelerator and run",
    "{}": "  accelerator: is missing; name the slice you want, like v4-8\n"
    "  run: is missing; say what to run, like python train.py",
    "- v4-8\n": ":1  is a list; a job file has keys, like accelerator: v4-8",
    "python train.py\n": ":1  is not a map; a job file has keys, like accelerator: v4-8",
    "accelerator: v4-8\n": "  run: is missing; say what to run, like python train.py",
    "run: x\n": "  accelerator: is missing; name the slice you want, like v4-8",
    "accelerator: v4-8\n\trun: x\n": ":2  a tab cannot indent YAML; use spaces",
    "accelerator: [v4-8\nrun: x\n": ":1  not valid YAML: a '[' is never closed",
    "run: 'x\naccelerator: v4-8\n": ":1  not valid YAML: a quote is opened and never closed",
    "name: a\nrun: echo a: b\n": ":2  not valid YAML: a colon that YAML cannot place; "
    "check the indent, or quote the text",
    "run: @x\n": ":1  not valid YAML: text cannot begin with @; put it in quotes",
    "run: *x\n": ":1  not valid YAML: undefined alias 'x'; put text with a * in quotes",
    "- a\nb: 1\n": ":2  not valid YAML: the indent does not fit the lines above",
    "a: &x 1\nb: &x 2\n": ":2  not valid YAML: the same anchor twice",
    "a: 1\n---\nb: 2\n": ":2  holds more than one YAML document; write one job a file",
    "name: \x07\n": ":1  holds the control character 0x7",
    'name: "\\UFFFFFFFF"\n': "  is not valid YAML",
    "a: x\n...\nb: y\n": ":3  not valid YAML: the document ends before this",
    "- a\n" * 50_000: "  holds more than 20,000 values",
    "[" * 5000: ":1  nested more than 20 deep",
    "a: &a [*a]": ":1  an alias refers to what it stands in",
    "x: '" + "x" * 1_000_000 + "'": "  is larger than 1 MB; "
    "data belongs in files in workdir or in a bucket",
    "accelerator: 8\nrun: x": ":1  accelerator: 8 is no slice; one looks like v4-8",
    "accelerator:\nrun: x": ":1  accelerator: has no value; write one after the colon",
    "accelerator: []\nrun: x": ":1  accelerator: is an empty list",
    "accelerator: {a: 1}\nrun: x": ":1  accelerator: is a map; it takes one name or a list",
    "accelerator: v4-12\nrun: x": f":1  accelerator: 'v4-12': v4 comes in {V4_SIZES}; "
    "nearest: v4-8, v4-16",
    "accelerator: v4\nrun: x": ":1  accelerator: 'v4' does not end in the size of a slice; "
    f"v4 comes in {V4_SIZES}",
    "accelerator: H100-8\nrun: x": ":1  accelerator: 'H100-8' names a GPU; only TPUs have slices: "
    "v2, v3, v4, v5litepod, v5p, v6e, tpu7x",
    "accelerator:\n  - v4-8\n  - v9-8\nrun: x": ":3  accelerator: 'v9-8' starts with no TPU "
    "generation; the generations are v2, v3, v4, v5litepod, v5p, v6e, tpu7x; nearest: v4, v3, v2",
    "accelerator: [v5e-16, v5litepod-16]\nrun: x": ":1  accelerator: v5litepod-16 is named twice",
    "accelerator: tpu7x-64\nrun: x": ":1  accelerator: tpu7x-64 is to be had on GKE only, "
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
    'name: "a\\nb"': "name: 'a\\nb' holds a line break or a character that cannot be printed",
    'name: "a\\0b"': "name: holds a character that no text can have",
    'name: "\\ud800"': "name: holds a character that no text can have",
    "name: !!python/object/apply:os.system [ls]": "name: the tag "
    "!!python/object/apply:os.system is not allowed; leave it out",
    "zones: us-central2": "zones: 'us-central2' is a region; its zones with v4: us-central2-b",
    "zones: us-east1": "zones: 'us-east1' is a region without v4; zones with it: us-central2-b",
    "zones: us-east1-d": "zones: us-east1-d has no v4; zones with it: us-central2-b",
    "zones: [us-central2-b, mars]": "zones: 'mars' is not a zone; example: us-central2-b",
    "zones: [any, us-central2-b]": "zones: any stands alone; write zones: any",
    "zones: 7": "zones: 7 is no zone; one looks like us-central2-b",
    "capacity: preemptible": "capacity: 'preemptible' is none of spot, on-demand, reserved; "
    "did you mean spot?",
    "capacity: true": "capacity: true is none of spot, on-demand, reserved",
    "workdir: nowhere": "workdir: 'nowhere' does not exist",
    "workdir: notes.txt": "workdir: 'notes.txt' is a file; workdir is a folder",
    "workdir: ~": "workdir: ~ alone is nothing to YAML; write none, or the folder in full",
    "setup: [a, b]": "setup: is a list; write the commands line by line below a |",
    "environment: [A=1]": "environment: is a list; it takes a map, like LEARNING_RATE: 3e-4",
    "environment: {1A: b}": f"environment.1A: '1A' {VARIABLE}",
    "environment: {B: }": "environment.B: has no value; write '' for an empty one",
    "environment: {DRUMLINE_HOST: 1}": "environment.DRUMLINE_HOST: 'DRUMLINE_HOST': "
    "names that begin with DRUMLINE_ are Drumline's own",
    "secrets: {HF_TOKEN: abc}": "secrets: is a map; list the names alone, "
    "the values are taken from your environment",
    "secrets: [HF_TOKEN=abc]": "secrets: give the name 'HF_TOKEN' alone, "
    "its value is taken from your environment",
    "secrets: [A, A]": "secrets: A is named twice",
    "python: pyenv": "python.kind: 'pyenv' is none of system, uv, venv, conda, docker; "
    "did you mean venv?",
    "python: docker": "python.image: is missing; docker needs one, like python:3.12-slim",
    "python: {kind: uv, image: x}": "python.image: is for docker, not for uv",
    "python: {version: 3.12}": "python.kind: is missing; "
    "it is one of system, uv, venv, conda, docker",
    "python: {kind: system, version: 3.10}": "python.version: the host has its own; "
    "uv, venv and conda take one",
    "python: {kind: uv, requirements: jax}": "python.requirements: 'jax' is no file in workdir; "
    "packages are written as a list: [jax]",
    "python: {kind: uv, requirements: ../r.txt}": "python.requirements: '../r.txt' is not inside "
    "workdir; name a file there, or list the packages",
    "python: 3.12": "python: is 3.12; write {kind: uv, version: 3.12}",
    "mounts: gs://lab-data": "mounts: is 'gs://lab-data'; "
    "it takes a map, like /data: gs://lab-data",
    "mounts: {data: gs://lab-data}": "mounts data: 'data' is neither absolute nor below ~/",
    "mounts: {/data: lab-data}": "mounts /data: 'lab-data' is no bucket; write gs://bucket/folder",
    "mounts: {/data: gs://Lab}": f"mounts /data: 'Lab' is no bucket name: {BUCKET}",
    "mounts: {/data: gs://ab}": "mounts /data: 'ab' is no bucket name: it takes 3 to 63 characters",
    "mounts: {/data: gs://10.0.0.1}": "mounts /data: '10.0.0.1' is no bucket name: "
    "it looks like an IP address",
    "mounts: {/data: gs://my-google-data}": "mounts /data: 'my-google-data' is no bucket name: "
    "Google keeps names with google in them for itself",
    "mounts: {/data: gs://lab-data/../x}": "mounts /data: 'gs://lab-data/../x' has a folder with "
    "an empty name, a dot for a name, or a line break",
    "mounts: {/: gs://lab-data}": "mounts /: '/' is the root or the home folder itself; "
    "name a folder in it",
    "mounts: {/d: gs://lab-data, /d/x: gs://lab-x}": "mounts /d/x: lies in the mount /d",
    "hosts: 2": "hosts: 2 could mean a host or a number of hosts; write a list: [2]",
    "hosts: [1]": "hosts: v4-8 has no host 1; it has one host, 0",
    "hosts: [0, 0]": "hosts: 0 is named twice",
    "hosts: [-1]": "hosts: -1 is no host; hosts are numbered from 0",
    "hosts: some": "hosts: is 'some'; it takes all, or a list of host numbers like [0, 1]",
    "checkpoint: s3://x/y": "checkpoint: 's3://x/y' is no bucket; write gs://bucket/folder",
    "checkpoint: 5": "checkpoint: 5 is a number, not text; put it in quotes: '5'",
    "retry: 5": "retry: is 5; it takes a map, like failures: 1",
    "retry: {failures: -1}": f"retry.failures: is -1; {ALLOWANCE}",
    "retry: {failures: true}": f"retry.failures: is true; {ALLOWANCE}",
    "retry: {failuers: 3}": "retry.failuers: unknown key; did you mean failures?",
    "project: My Project": "project: 'My Project' is no project id; "
    "one has 6 to 30 lower-case letters, digits and hyphens",
    "allow_cross_region: maybe": "allow_cross_region: is 'maybe'; it takes true or false",
    "stop_grace: soon": "stop_grace: is 'soon'; it takes seconds, like 30, or 30s, 2m",
    "stop_grace: 99h": "stop_grace: is '99h'; it takes 0 s to 1 h",
    "stop_grace: .nan": "stop_grace: is .nan; it takes seconds, like 30, or 30s, 2m",
    "progress: '('": "progress: '(' is no regular expression: missing ), unterminated subpattern",
    "progress: 'at (.*)'": "progress: 'at (.*)' has no group called step, like (?P<step>\\d+)",
    "chekpoint: /x": "chekpoint: unknown key; did you mean checkpoint?",
    "env: {A: b}": "env: unknown key; did you mean environment?",
    "burnin: thorough": "burnin: 'thorough' is none of off, short, long",
    "burnin: on": "burnin: on is none of off, short, long",
    "parking: -1": "parking: is -1; it takes a whole number from 0 to 8",
    "parking: 99": "parking: is 99; it takes a whole number from 0 to 8",
    "frobnicate: 1": "frobnicate: unknown key; the keys are name, accelerator, zones, capacity, "
    "workdir, include, setup, environment, secrets, python, mounts, run, hosts, checkpoint, retry, "
    "burnin, parking, project, allow_cross_region, stop_grace, keep, progress, stuck_after",
    "<<: {a: b}": "<< is not supported; write the keys out",
    "? [a]\n: b": "a key must be text",
    "run: again": "run: given twice, first in line 2",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("a file")
    return tmp_path


def said(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text, source="job.yaml", folder=folder, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("text", WHOLE_FILES, ids=lambda text: repr(text[:40]))
def test_a_bad_file_says_what_to_mend(text: str, folder: Path) -> None:
    expected = [f"job.yaml{line}" for line in WHOLE_FILES[text].split("\n")]
    assert said(text, folder).split("\n") == expected


@pytest.mark.parametrize("text", ONE_KEY)
def test_a_bad_value_is_one_sentence_with_its_line(text: str, folder: Path) -> None:
    assert said(GOOD + text, folder) == f"job.yaml:3  {ONE_KEY[text]}"


def test_all_mistakes_come_together_in_the_order_of_the_file(folder: Path) -> None:
    text = (
        "name: llama\naccelerator: v4-128\nrun: python train.py\nzones: us-central2\n"
        "retry:\n  failures: many\nchekpoint: /x\nhosts:\n  - 0\n  - 99\n"
        "environment:\n  GOOD: 1\n  BAD: [1]\n  'TWO WORDS': x\n"
    )
    assert said(text, folder) == (
        "job.yaml:4  zones: 'us-central2' is a region; its zones with v4: us-central2-b\n"
        f"job.yaml:6  retry.failures: is 'many'; {ALLOWANCE}\n"
        "job.yaml:7  chekpoint: unknown key; did you mean checkpoint?\n"
        "job.yaml:10  hosts: v4-128 has no host 99; it has hosts 0 to 15\n"
        "job.yaml:13  environment.BAD: is a list; a variable takes text\n"
        f"job.yaml:14  environment.TWO WORDS: 'TWO WORDS' {VARIABLE}"
    )


def test_there_is_a_limit_to_mounts(folder: Path) -> None:
    mounts = "".join(f"  /m{n}: gs://lab-data\n" for n in range(51))
    expected = "job.yaml:3  mounts: has 51 mounts; 50 are the most a host takes on"
    assert said(f"{GOOD}mounts:\n{mounts}", folder) == expected


def test_a_problem_can_be_read_by_a_program(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse(GOOD + "retry: {failures: -1}", source="job.yaml", folder=folder)
    (problem,) = caught.value.problems
    assert (problem.source, problem.line, problem.key) == ("job.yaml", 3, "retry.failures")
    assert problem.message == f"is -1; {ALLOWANCE}"


def test_a_secret_is_not_a_plain_variable_too(folder: Path) -> None:
    text = GOOD + "environment: {HF_TOKEN: abc}\nsecrets: [HF_TOKEN]"
    expected = "job.yaml:4  secrets: HF_TOKEN stands in environment too; keep it in one of them"
    assert said(text, folder) == expected


def test_requirements_in_a_file_need_a_workdir(folder: Path) -> None:
    text = GOOD + "python: {kind: uv, requirements: r.txt}\nworkdir: none"
    assert said(text, folder) == (
        "job.yaml:3  python.requirements: 'r.txt' is a file in workdir, which is none; "
        "list the packages instead"
    )


def test_aliases_that_grow_without_measure_are_refused(folder: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert said("\n".join(levels), folder).endswith("aliases expand it beyond 20,000 values")


def test_what_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(SpecError) as caught:
            load(path)
        return str(caught.value)

    assert refusal(tmp_path / "gone.yaml") == f"{tmp_path}/gone.yaml  there is no such file"
    assert refusal(tmp_path) == f"{tmp_path}  is a folder; name the job file in it"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"accelerator: v4-8\nname: caf\xe9\n")
    assert refusal(latin) == f"{latin}:2  is not UTF-8 text; save the job file as UTF-8"
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    assert refusal(large).endswith(
        "is larger than 1 MB; data belongs in files in workdir or in a bucket"
    )
    below_a_file = latin / "job.yaml"
    assert refusal(below_a_file) == f"{below_a_file}  cannot be read: Not a directory"

"""Valid job files and their values, and random text that must not crash the reader."""

import contextlib
import json
import os
import socket
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.jobs.spec import JobSpec, Problem, SpecError, load, parse, validate

EXAMPLES = Path(__file__).parents[3] / "examples"
GOOD = "accelerator: v4-8\nrun: python train.py\n"


def read(text: str, folder: Path, *overrides: str, source: str = "job.yaml") -> JobSpec:
    return parse(text, source=source, folder=folder, overrides=overrides)


def test_a_job_needs_two_keys(tmp_path: Path) -> None:
    (tmp_path / "vit.yaml").write_text(GOOD)
    spec = load(tmp_path / "vit.yaml")
    assert (spec.name, spec.accelerator, spec.zones) == ("vit", ("v4-8",), "any")
    assert (spec.capacity, spec.hosts, spec.python.kind) == ("spot", "all", "system")
    assert spec.workdir == tmp_path.resolve()
    assert (spec.retry.failures, spec.retry.bad_hosts) == (3, 10)
    assert spec.retry.preemptions == "unlimited"
    assert (spec.checkpoint, spec.stop_grace, spec.allow_cross_region) == (None, 30.0, False)


def test_a_full_job_survives_its_trip_to_the_server(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("jax")
    spec = read(
        """
        name: it's "$(rm -rf ~)" · ü
        accelerator: [V4-128, v5e-64]
        zones: [us-central2-b, us-west4-a, local-a]
        capacity: on-demand
        setup: |
          echo one
          echo two
        environment: {LR: 3e-4, PY: 1.10, DEBUG: yes, NO: 010, EMPTY: ''}
        secrets: HF_TOKEN
        python: {kind: uv, version: 3.10, requirements: requirements.txt}
        mounts: {/data/: gs://lab-data/c4/, ~/more: gs://lab.example}
        run: python train.py
        hosts: [3, 0]
        checkpoint: gs://lab-data/checkpoints/
        retry: {failures: unlimited, preemptions: 5}
        project: lab-tpu-1
        allow_cross_region: true
        stop_grace: 2m
        progress: 'step (?P<step>\\d+)'
        """,
        tmp_path,
    )
    assert spec.name == 'it\'s "$(rm -rf ~)" · ü'
    assert spec.accelerator == ("v4-128", "v5litepod-64")
    assert spec.environment == {
        "LR": "3e-4",
        "PY": "1.10",
        "DEBUG": "yes",
        "NO": "010",
        "EMPTY": "",
    }
    assert spec.python.version == "3.10"
    assert spec.mounts == {"/data": "gs://lab-data/c4", "~/more": "gs://lab.example"}
    assert (spec.hosts, spec.stop_grace) == ((0, 3), 120.0)
    sent = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert JobSpec.model_validate(sent) == validate(sent) == spec


def test_a_stored_job_can_be_read_after_its_folder_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    spec = read(GOOD + "workdir: code", tmp_path)
    sent = spec.model_dump(mode="json")
    (tmp_path / "code").rmdir()
    assert validate(sent).workdir == tmp_path.resolve() / "code"


def test_errors_in_json_are_reported() -> None:
    with pytest.raises(SpecError) as caught:
        validate({"accelerator": "v4-8", "run": 7, "hosts": [True], "workdir": "here", "x": 1})
    assert str(caught.value).split("\n")[:3] == [
        "job  workdir: 'here' is not an absolute path",
        "job  run: 7 is a number, not text; put it in quotes: '7'",
        "job  hosts: true is not a host; hosts are numbered from 0",
    ]
    with pytest.raises(SpecError):
        validate(["not", "a", "job"])


@pytest.mark.parametrize("value", ["none", "null", ""])
def test_a_job_may_send_no_code(value: str, tmp_path: Path) -> None:
    assert read(f"{GOOD}workdir: {value}", tmp_path).workdir is None


def test_folders_are_relative_to_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    spec = read(GOOD + "workdir: ..\ncheckpoint: out/ckpt", tmp_path / "jobs")
    assert spec.workdir == tmp_path.resolve()
    assert spec.checkpoint == str(tmp_path / "jobs/out/ckpt")
    assert read(GOOD + "checkpoint: ~/data/x", tmp_path).checkpoint == "~/data/x"


def test_maps_may_be_empty(tmp_path: Path) -> None:
    spec = read(GOOD + "environment:\nmounts:\nretry:\npython:\nsecrets:\nsetup:\n", tmp_path)
    assert (spec.environment, spec.mounts, spec.retry.failures) == ({}, {}, 3)
    assert (spec.python.kind, spec.secrets, spec.setup) == ("system", (), None)


def test_an_alias_may_repeat_a_value(tmp_path: Path) -> None:
    spec = read(GOOD + "environment: {A: &it hello, B: *it}", tmp_path)
    assert spec.environment == {"A": "hello", "B": "hello"}


def test_a_date_and_an_odd_file_name_are_valid_names(tmp_path: Path) -> None:
    assert read(GOOD + "name: 2026-11-15", tmp_path).name == "2026-11-15"
    assert read(GOOD, tmp_path, source="a\nb.yaml").name == "a?b"


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("0", 0), ("45", 45), ("1.5", 1.5), ("30s", 30), ("2 m", 120), ("1h", 3600)],
)
def test_the_grace_period_may_have_a_unit(written: str, seconds: float, tmp_path: Path) -> None:
    assert read(f"{GOOD}stop_grace: {written}", tmp_path).stop_grace == seconds


# --- --set ------------------------------------------------------------------------------------


def test_set_replaces_values_of_the_file(tmp_path: Path) -> None:
    spec = read(
        GOOD + "retry: {failures: 9, bad_hosts: 7}\npython: uv\nzones: nonsense",
        tmp_path,
        "retry.failures=1",
        "environment.LR=3e-4",
        "environment.EMPTY=",
        "zones=[us-central2-b, local-a]",
        "python.version=3.10",
        "mounts./data/v1.2=gs://lab-data",
        "run=python -c 'print(1)': x # y",
        "name='no'",
    )
    assert (spec.retry.failures, spec.retry.bad_hosts) == (1, 7)
    assert spec.environment == {"LR": "3e-4", "EMPTY": ""}
    assert spec.zones == ("us-central2-b", "local-a")
    assert (spec.python.kind, spec.python.version) == ("uv", "3.10")
    assert spec.mounts == {"/data/v1.2": "gs://lab-data"}
    assert spec.run == "python -c 'print(1)': x # y"
    assert spec.name == "no"


def test_set_adds_missing_keys(tmp_path: Path) -> None:
    assert read("", tmp_path, "accelerator=v4-8", "run=true # ok").run == "true # ok"
    assert read("", tmp_path, "accelerator=v4-8", "run=# nothing").run == "# nothing"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("zones=us-central2", "zones: 'us-central2' is a region; its zones with v4: us-central2-b"),
        ("retry.failures=x", "retry.failures: is 'x'; "
         "expected a whole number from 0, or unlimited"),
        ("retry.failuers=1", "retry.failuers: unknown key; did you mean failures?"),
        ("chekpoint=/x", "chekpoint: unknown key; did you mean checkpoint?"),
        ("chekpoint.x=1", "chekpoint.x: unknown key; did you mean checkpoint?"),
        ("run.x=1", "run.x: run has no keys of its own; write run=value"),
        ("zones=[us-central2-b", "zones: not valid YAML: a '[' is never closed"),
        ("name=no", "name: YAML reads no as false; put it in quotes: 'no'"),
        ("run=true", "run: YAML reads true as a boolean; put it in quotes: 'true'"),
        ("run=", "run: is empty"),
        ("run", "is not key=value, like retry.failures=1"),
        ("=x", "is not key=value, like retry.failures=1"),
        ("retry.=x", "has no key after retry."),
        ("hosts=[5]", "hosts: v4-8 has no host 5; it has only host 0"),
        ("environment.A B=1", "environment.A B: 'A B' is not a variable name; "
         "use letters, digits and _, and do not start with a digit"),
    ],
)  # fmt: skip
def test_an_error_in_set_names_the_option(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read(GOOD, tmp_path, override)
    assert str(caught.value) == f"--set {override}  {message}"
    assert caught.value.problems[0].line is None


def test_errors_of_the_file_and_of_set_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read(GOOD + "name: no", tmp_path, "capacity=cheap")
    assert str(caught.value) == (
        "job.yaml:3  name: YAML reads no as false; put it in quotes: 'no'\n"
        "--set capacity=cheap  capacity: 'cheap' is not one of spot, on-demand, reserved"
    )


# --- random text ------------------------------------------------------------------------------

KEYS = st.sampled_from([*JobSpec.model_fields, "kind", "failures", "/data", "A", "<<", "x y", ""])
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["v4-8", "any", "us-central2-b", "gs://lab-data", "all", "30s", "~", "uv"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
YAMLISH = st.text(alphabet=string.printable + "é\u2028\ud7ff\x85", max_size=80)
FOREIGN_WORDS = (
    "Input should", "Field required", "Value error", "valid string", "Traceback",
    "which is not allowed here",  # the fallback for values that our own checks accept
)  # fmt: skip


def check_outcome(text: str, *overrides: str) -> None:
    """Check that the text is a job that survives JSON, or gives errors of one line each."""
    problems: tuple[Problem, ...] = ()
    try:
        spec = read(text, Path("/"), *overrides)
        assert validate(json.loads(spec.model_dump_json())) == spec
    except SpecError as error:
        problems = error.problems
    for problem in problems:
        assert len(str(problem).splitlines()) == 1
        assert not any(words in str(problem) for words in FOREIGN_WORDS)


@settings(deadline=None, max_examples=300)
@given(YAMLISH)
def test_any_text_is_a_job_or_an_error(text: str) -> None:
    check_outcome(text)
    check_outcome(GOOD + text)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_values_are_a_job_or_errors(values: dict[str, object]) -> None:
    check_outcome(yaml.safe_dump({"accelerator": "v4-8", "run": "x", **values}, allow_unicode=True))


@settings(deadline=None, max_examples=200)
@given(KEYS, st.text(max_size=3), YAMLISH | st.text(max_size=20))
def test_any_override_is_a_job_or_an_error(key: str, middle: str, value: str) -> None:
    check_outcome(GOOD, f"{key}{middle}={value}", f"{key}.{middle}={value}", value)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(JobSpec.model_fields)), YAMLISH)
def test_any_value_of_a_key_is_a_job_or_an_error(key: str, value: str) -> None:
    check_outcome(f"accelerator: v4-8\nrun: x\n{key}: {value}\n")
    check_outcome(f"{GOOD}environment:\n  {value}\n  A: b\n")


def test_any_bytes_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"

    @settings(deadline=None, max_examples=100)
    @given(st.binary(max_size=60))
    def check(raw: bytes) -> None:
        file.write_bytes(raw)
        with pytest.raises(SpecError):
            load(file)

    check()


# --- examples ---------------------------------------------------------------------------------


def test_every_example_is_valid() -> None:
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert EXAMPLES / "tpu-v4.yaml" in files
    for file in files:
        assert load(file).run


@pytest.mark.parametrize("kind", ["named pipe", "device", "folder", "huge", "socket"])
def test_something_else_than_a_job_file_is_rejected_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "job.yaml"
    match kind:
        case "named pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 30)
        case "socket":
            with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as listener:
                listener.bind("job.yaml")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_job_file_may_come_from_a_pipe_of_the_shell() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"accelerator: v4-8\nrun: 'true'\nworkdir: null\n")
    os.close(write_end)
    assert load(Path(f"/dev/fd/{read_end}")).run == "true"
    os.close(read_end)

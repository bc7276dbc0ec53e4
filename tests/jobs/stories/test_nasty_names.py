"""Quotes, spaces, `$(…)`, newlines and leading dashes are passed unchanged and never executed."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.jobs.spec import SpecError
from tests.jobs.installation import Installation

DRUMLINE = Path(sys.executable).parent / "drumline"
CLOUD_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


@pytest.fixture
def touch(tmp_path: Path, shared: Installation) -> Iterator[str]:
    """A command that must never run; it would create a file."""
    yield f"touch {tmp_path}/pwned pwned"
    assert not (tmp_path / "pwned").exists()
    assert "pwned" not in {path.name for path in shared.files()}
    assert not Path("pwned").exists()


def nasty(touch: str) -> list[str]:
    """Text that an unquoted shell would execute."""
    return [
        f"$({touch})",
        f"`{touch}`",
        f"; {touch}",
        f"x' ; {touch} ; '",
        f'x" ; {touch} ; "',
        f"x && {touch} # ",
        f"| {touch}",
        "-rf",
        "--help",
        "../../..",
        "a  b",
        "$HOME ~ * ? [a] {a,b} \\ % ! é 名",
    ]


def log(shared: Installation, job: str) -> str:
    return b"".join(shared.client.logs(job)).decode()


def test_names_are_never_executed_and_the_clouds_names_stay_valid(
    shared: Installation, touch: str
) -> None:
    shared.emulator("capacity", zone="local-c", accelerator="v4-8", chips=0)
    names = nasty(touch)
    jobs = {shared.create("true", name=n, accelerator="v4-8", zones=["local-c"]): n for n in names}

    # The server requests this many at once in one zone; the others wait.
    shared.until(lambda: len(shared.requests(*jobs)) == 8, what="the requests")
    assert all(CLOUD_NAME.fullmatch(one["name"]) for one in shared.requests(*jobs))
    listed = {job["id"]: job["name"] for job in shared.client.list()}
    assert {job: listed[job] for job in jobs} == jobs
    for words in (["list"], ["show", next(iter(jobs))], ["delete", "--dry-run", *jobs]):
        done = subprocess.run(
            [DRUMLINE, *words],
            env={"DRUMLINE_HOME": str(shared.home), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        assert names[0] in done.stdout
    shared.client.delete(jobs)
    shared.until(lambda: not shared.requests(*jobs), what="the requests to be deleted")


def test_values_and_the_code_arrive_to_the_letter(shared: Installation, touch: str) -> None:
    values = [*nasty(touch), f"two\nlines\n$({touch})\n", "", " ", "\t", "a\\nb", "'", '"']
    environment = {f"V{n}": value for n, value in enumerate(values)}
    path = shared.write_job(
        "python -c 'import json, os;"
        ' print(json.dumps({k: v for k, v in os.environ.items() if k[:1] == "V"}))\'\n'
        'ls -A > listing; python -c \'print(__import__("json").dumps(open("listing").read()))\'',
        name=values[0],
        accelerator="v4-8",
        environment=environment,
        setup=f"printf '%s\\n' 'set up: $({touch})' \"it's here\"",
    )
    files = ["-rf", "a b", "it's", "$(id)", "--help"]
    for name in files:
        (path.parent / name).write_text("x")
    folder = path.parent.rename(path.parent.with_name('it\'s $(id) ; `id` "x"'))
    job = str(shared.client.create(folder / path.name)["id"])
    assert shared.end(job)["status"] == "SUCCEEDED", log(shared, job)
    lines = log(shared, job).splitlines()
    assert f"set up: $({touch})" in lines
    assert "it's here" in lines
    *_, seen, listing = lines
    seen_values = {k: v for k, v in json.loads(seen).items() if k in environment}
    assert seen_values == environment
    assert set(files) < set(json.loads(listing).splitlines())
    assert shared.client.show(job)["spec"]["environment"] == environment


def test_places_and_commands_are_taken_to_the_letter(shared: Installation, touch: str) -> None:
    inside = touch.replace("/", "_")
    job = shared.create(
        'echo "$DRUMLINE_CHECKPOINT"; mkdir -p "$DRUMLINE_CHECKPOINT"\n'
        'for d in ~/data*; do touch "$d/here"; done\n'
        'until [ -e "$HOME/go" ]; do sleep 0.05; done',
        accelerator="v4-8",
        mounts={f"~/data; {inside}": f"gs://counts/it's $({inside}) `{inside}`"},
        checkpoint=f"gs://counts/saved $({inside})",
    )
    shared.until(lambda: "saved" in log(shared, job), what="the program")
    buckets = shared.home / "emulator" / "buckets" / "counts"
    saved = Path(shared.client.show(job)["checkpoint"]).name
    assert (buckets / f"saved $({inside})" / saved).is_dir()
    shared.until(lambda: (buckets / f"it's $({inside}) `{inside}`" / "here").exists())
    [result] = shared.client.exec(
        job, ["printf", "%s|", f"$({touch})", "a  b", "it's", "two\nlines"]
    )
    assert result["stdout"] == f"$({touch})|a  b|it's|two\nlines|"
    shared.client.exec(job, "touch ~/go")
    assert shared.end(job)["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "two\nlines"},
        {"name": "a\x1b[2Jb"},
        {"zones": ["$(id)"]},
        {"zones": ["local-a; rm -rf ~"]},
        {"zones": ["-a"]},
        {"accelerator": "v4-8; id"},
        {"environment": {"A;id": "x"}},
        {"environment": {"$(id)": "x"}},
        {"secrets": ["$(id)"]},
        {"mounts": {"~/x\ny": "gs://counts/x"}},
        {"mounts": {"~/x": "gs://$(id)/x"}},
        {"project": "$(id)"},
        {"python": {"kind": "docker", "image": "-v/:/host"}},
        {"python": {"kind": "uv", "requirements": "--index-url=x"}},
    ],
    ids=lambda keys: json.dumps(keys),
)
def test_invalid_values_are_rejected_in_one_sentence(
    shared: Installation, keys: dict[str, object]
) -> None:
    before = len(shared.client.list(all=True))
    path = shared.write_job("true", **({"accelerator": "v4-8"} | keys))
    with pytest.raises(SpecError) as refused:
        shared.client.create(path)
    assert len(str(refused.value).splitlines()) == 1
    assert len(shared.client.list(all=True)) == before

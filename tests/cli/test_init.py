import errno
import io
import os
import stat
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from drumline.cloud.protocol import CloudError

Run = Callable[..., int]
Printed = pytest.CaptureFixture[str]

GOOD = ("init", "--project", "lab-tpu", "--zones", "us-central2-b,europe-west4-a")


class Terminal(io.StringIO):
    """A fake terminal with typed answers."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid credentials, and no project in the environment."""

    async def token(*_: object) -> str:
        return "t0ken"

    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    monkeypatch.setattr("drumline.cloud.google.credentials.GoogleCredentials.token", token)


def settings(home: Path) -> object:
    return yaml.safe_load((home / "config.yaml").read_text())


def test_init_writes_private_settings(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline(*GOOD, "--quota", "64 spot v6e chips in europe-west4-a") == 0
    assert settings(home) == {
        "cloud": "google",
        "project": "lab-tpu",
        "zones": ["us-central2-b", "europe-west4-a"],
        "quota": ["64 spot v6e chips in europe-west4-a"],
    }
    assert stat.S_IMODE((home / "config.yaml").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    out = capsys.readouterr().out
    assert "✓ credentials" in out
    assert "t0ken" not in out
    assert out.splitlines()[-1] == "next: drumline create job.yaml --dry-run"


def test_the_server_reads_the_settings_of_init(home: Path, drumline: Run) -> None:
    from drumline.jobs.config import read

    assert drumline(*GOOD, "--quota", "64 spot v6e chips in europe-west4-a") == 0
    config = read(home)
    assert (config.project, config.zones) == ("lab-tpu", ("us-central2-b", "europe-west4-a"))


def test_zones_can_come_from_the_quota(home: Path, drumline: Run) -> None:
    grants = ["64 spot v6e chips in europe-west4-a", "32 on-demand v4 chips in us-central2-b"]
    options = [word for grant in grants for word in ("--quota", grant)]
    assert drumline("init", "--project", "lab-tpu", *options) == 0
    assert yaml.safe_load((home / "config.yaml").read_text())["zones"] == [
        "europe-west4-a",
        "us-central2-b",
    ]


def test_a_failed_login_is_reported_and_keeps_the_settings(
    home: Path, drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> str:
        raise CloudError("no Google credentials: run gcloud auth application-default login", 16)

    monkeypatch.setattr("drumline.cloud.google.credentials.GoogleCredentials.token", refused)
    assert drumline(*GOOD) == 0
    assert "! credentials: no Google credentials: run gcloud" in capsys.readouterr().out
    assert (home / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zones", "us-central2-b"], "no project: use drumline init --project ID"),
        (["--project", "lab-tpu"], "no zones: use drumline init --zones"),
        (["--project", "Lab TPU", "--zones", "us-central2-b"], "is not a project id"),
        (["--project", "lab-tpu", "--zones", "us-central2"], "'us-central2' is a region"),
        (["--project", "lab-tpu", "--zones", "nowhere"], "'nowhere' is not a zone"),
        (["--project", "lab-tpu", "--quota", "lots"], "'lots' is not like '64 spot v6e chips"),
        (["--project", "lab-tpu", "--quota", "1 spot v99 chip in us-central2-b"], "v99"),
    ],
)
def test_an_invalid_option_writes_nothing(
    home: Path, drumline: Run, capsys: Printed, arguments: list[str], message: str
) -> None:
    assert drumline("init", *arguments) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert message in sentence
    assert not (home / "config.yaml").exists()


def test_replacing_settings_needs_a_confirmation(
    home: Path, drumline: Run, capsys: Printed
) -> None:
    (home / "config.yaml").write_text("cloud: google\nproject: old-lab\nlook_seconds: 5\n")
    before = settings(home)
    assert drumline(*GOOD) == 2
    assert "add --yes" in capsys.readouterr().err
    assert settings(home) == before
    assert drumline(*GOOD, "--yes") == 0
    after = settings(home)
    assert isinstance(after, dict)
    assert (after["project"], after["look_seconds"]) == ("lab-tpu", 5)
    assert drumline(*GOOD) == 0  # a second run replaces nothing


def test_local_needs_no_account(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("init", "--local") == 0
    assert settings(home) == {"cloud": "emulator"}
    out = capsys.readouterr().out
    assert "credentials" not in out
    assert out.splitlines()[-1] == "next: drumline init --example"


def test_a_terminal_prompts_for_missing_options(
    home: Path, drumline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("lab-tpu\nus-central2-b\n"))
    assert drumline("init") == 0
    expected = {"cloud": "google", "project": "lab-tpu", "zones": ["us-central2-b"]}
    assert settings(home) == expected


# The example --------------------------------------------------------------------------------------


@pytest.fixture
def empty(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the current one, in an installation without jobs."""
    assert not list(home.iterdir())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(find_spec("jax") is None, reason="it needs jax, and init says so")
def test_the_example_is_a_program_with_a_job_file(
    home: Path, empty: Path, drumline: Run, capsys: Printed
) -> None:
    assert drumline("init", "--example") == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote example/job.yaml",
        "wrote example/train.py",
        "next: drumline create example/job.yaml --follow",
    ]
    assert {path.name for path in (empty / "example").iterdir()} == {"job.yaml", "train.py"}
    assert not list(home.iterdir())  # the settings are not part of it


def test_the_next_command_quotes_the_folder(empty: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("init", "--example", "my jobs/first") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "next: drumline create 'my jobs/first/job.yaml' --follow"
    )
    assert (empty / "my jobs" / "first" / "train.py").exists()


@pytest.mark.parametrize("link", [False, True], ids=["file", "broken link"])
def test_the_example_replaces_nothing(
    empty: Path, drumline: Run, capsys: Printed, link: bool
) -> None:
    if link:
        (empty / "train.py").symlink_to("elsewhere.py")
    else:
        (empty / "train.py").write_text("mine")
    assert drumline("init", "--example", ".") == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("train.py exists, and nothing was written")
    assert [path.name for path in empty.iterdir()] == ["train.py"]
    assert link or (empty / "train.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file", "file is not a folder"),
        ("file/below", "Not a directory"),
        ("new/" + 300 * "x", "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_sentence(
    empty: Path, drumline: Run, capsys: Printed, folder: str, message: str
) -> None:
    (empty / "file").touch()
    assert drumline("init", "--example", folder) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert message in sentence
    assert [path.name for path in empty.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing_of_the_example(
    empty: Path, drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def read_or_fail(path: Path) -> bytes:
        if path.name == "train.py":
            raise OSError(errno.ENOSPC, "No space left on device", "example/train.py")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_or_fail)
    assert drumline("init", "--example", "new/example") == 2
    assert "No space left on device; no example was written" in capsys.readouterr().err
    assert not list(empty.iterdir())


def test_a_private_umask_does_not_hide_the_example_from_the_hosts(
    empty: Path, drumline: Run
) -> None:
    before = os.umask(0o077)
    try:
        assert drumline("init", "--example") == 0
    finally:
        os.umask(before)
    for path in (empty / "example", *(empty / "example").iterdir()):
        assert path.stat().st_mode & 0o044 == 0o044


@pytest.mark.usefixtures("empty")
def test_missing_jax_is_named_with_its_command(
    drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.train.REQUIRED_PACKAGES", ("no_such_jax",))
    assert drumline("init", "--example") == 0
    out = capsys.readouterr().out
    assert "! training needs no_such_jax: pip install 'drumline[jax]'\nnext: " in out


@pytest.mark.usefixtures("empty")
def test_the_example_warns_that_a_job_would_cost_money(drumline: Run, capsys: Printed) -> None:
    assert drumline(*GOOD) == 0
    assert drumline("init", "--example") == 0
    assert "! jobs run on Google Cloud, project lab-tpu, and cost money" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--example", "--local"], "--example writes no settings"),
        (["folder"], "folder: a folder is for the example; add --example"),
    ],
)
def test_options_that_do_not_fit_the_example(
    empty: Path, drumline: Run, capsys: Printed, arguments: list[str], message: str
) -> None:
    assert drumline("init", *arguments) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert message in sentence
    assert not list(empty.iterdir())

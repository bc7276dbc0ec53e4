"""A full disk ends the run with a message, and no checkpoint is lost."""

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drumline.train import fingerprint, fit
from drumline.train.__main__ import main
from drumline.train.checkpoints.checkpoint import _is_not_of_orbax
from tests.train.toy import toy

CONFIG = """
from tests.train.toy import toy
def recipe(*, steps: int = 10, log_every: int = 1):
    return toy(steps, save_every=20, log_every=log_every)
"""


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """Return a command that trains into a folder with a previous run."""
    (tmp_path / "config.py").write_text(CONFIG)
    fit(toy(10, save_every=20), checkpoint=tmp_path / "run")
    return [str(tmp_path / "config.py"), "--checkpoint", str(tmp_path / "run")]


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Limit the size of files. The system reports this like a full disk, with another error
    number.
    """
    previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, previous_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)


def test_a_full_disk_at_the_start_is_a_user_error(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "run" / f"attempts.json.{os.getpid()}.draft"
    draft.symlink_to("/dev/full")
    capsys.readouterr()
    assert main(run) == 2
    output = capsys.readouterr()
    reason = "cannot be used: No space left on device"
    assert output.err == f"checkpoint: {tmp_path / 'run'} {reason}\n"
    assert not draft.is_symlink()
    assert main(run) == 0


def test_a_file_that_cannot_be_opened_at_the_start_is_a_user_error(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    capsys.readouterr()
    assert main(run) == 2
    output = capsys.readouterr()
    assert output.err == f"checkpoint: {tmp_path / 'run'} cannot be used: Is a directory\n"


def test_only_failed_tasks_of_orbax_are_not_reported() -> None:
    def reported(place: str) -> bool:
        message = f"Task exception was never retrieved\nfuture: <Task coro=<f() at {place}>>"
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, None, None)
        return _is_not_of_orbax(record)

    assert not reported("site-packages/orbax/checkpoint/_src/serialization.py:193")
    assert reported("train.py:12")


@pytest.mark.parametrize(
    ("log_every", "limit"), [(1, 8000), (1000, 2000)], ids=["metrics", "checkpoint"]
)
def test_a_disk_that_fills_up_ends_the_run_with_a_message_and_intact_checkpoints(
    run: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    log_every: int,
    limit: int,
) -> None:
    arguments = [*run, "--set", "steps=60", "--set", f"log_every={log_every}"]
    capsys.readouterr()
    with limit_file_size(limit):
        assert main(arguments) == 1
    output = capsys.readouterr()
    assert not [record for record in caplog.records if record.exc_info]
    assert output.err == (
        f"checkpoint: {tmp_path / 'run'} can no longer be written: File too large; its "
        "checkpoints are intact: fix the problem and start again to resume from the newest\n"
    )
    assert main(arguments) == 0
    assert "resuming from step " in (log := capsys.readouterr().out)
    assert "damaged" not in log
    assert f"parameters {fingerprint(fit(toy(60)).state.params)}" in log

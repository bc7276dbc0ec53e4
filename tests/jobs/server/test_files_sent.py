"""Files that create, its dry run and resume omit or reject."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts import code
from drumline.jobs.connection import CONTENT_TOO_LARGE
from drumline.jobs.server.job_files import PackingOptions
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.spec import SpecError, load
from tests.cases import rare
from tests.hosts.packing_table import openssh_key
from tests.jobs.fakes import ZONE, ServerHarness, run_scenario

LINE = (
    "left out: .env (environment file), deploy/id_ed25519 (private key); "
    "to send one, name it under include"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "deploy").mkdir(parents=True)
    (folder / "train.py").write_text("x = 1")
    (folder / ".env").write_text("A=1")
    (folder / "deploy" / "id_ed25519").write_text(openssh_key())
    return folder


def spec_for(folder: Path, **keys: Any) -> dict[str, Any]:
    return {
        "accelerator": "v4-16", "zones": [ZONE], "run": "x", "workdir": str(folder),
    } | keys  # fmt: skip


def test_create_and_its_dry_run_list_the_files_left_out(tmp_path: Path, folder: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        planned = await harness.service.plan(spec_for(folder))
        assert LINE in planned["lines"]
        assert "would send 1 file (1 kB)" in planned["lines"]
        made = await harness.service.create(spec_for(folder), {}, "lab")
        assert made["left_out"] == planned["left_out"] == made["code"]["left_out"]
        assert made["left_out"] == [
            {"path": ".env", "reason": "environment file"},
            {"path": "deploy/id_ed25519", "reason": "private key"},
        ]
        assert made["left_out_total"] == 2
        assert LINE in [event["text"] for event in harness.show(made["id"])["events"]]
        whole = spec_for(folder, include=[".env", "deploy/id_ed25519"])
        assert (await harness.service.plan(whole))["left_out"] == []

    run_scenario(tmp_path / "home", scenario)


def test_large_code_is_only_sent_if_its_user_allows_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "ASK_FILE_BYTES", 1_500_000)
    (folder / "data.bin").write_bytes(b"x" * 2_000_000)
    question = "! much is sent to every host: create asks first, and needs --yes without a terminal"

    async def scenario(harness: ServerHarness) -> None:
        service, spec = harness.service, spec_for(folder)
        assert question in (await service.plan(spec))["lines"]
        with pytest.raises(RequestError) as refused:
            await service.create(spec, {}, "lab")
        assert refused.value.http_status == CONTENT_TOO_LARGE
        assert str(refused.value).startswith(
            "2.0 MB would be sent to every host; the largest files are data.bin (2.0 MB); "
        )
        assert service.overview() == []
        assert not list(service.folders.code.iterdir())
        allowed = PackingOptions(allow_large=True)
        job = (await service.create(spec, {}, "lab", packing=allowed))["id"]
        await service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        assert "restarts" in (await service.verb(job, "resume", {}))["text"], "it was allowed"
        (folder / ".drumlineignore").write_text("*.bin\n")
        assert question not in (await service.plan(spec))["lines"]
        await service.create(spec, {}, "lab")

    run_scenario(tmp_path / "home", scenario)


def test_the_progress_of_sending_is_the_note_of_a_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        assert harness.show(job)["sending"] is None
        session = harness.starts(job)[-1]
        session._hosts = [
            replace(report, sent_bytes=30_000_000, bytes_to_send=100_000_000)
            for report in session._hosts
        ]
        hosts = len(session._hosts)
        sending = {"hosts": hosts, "bytes": 30_000_000 * hosts, "total": 100_000_000 * hosts}
        assert harness.show(job)["sending"] == sending
        note = f"sending files to {hosts} hosts: {30 * hosts} of {100 * hosts} MB"
        assert harness.show(job)["reason"] == note

    run_scenario(tmp_path / "home", scenario)


@pytest.mark.parametrize("by", ["environment", "users"])
def test_the_home_folder_is_rejected_everywhere(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("HOME", str(folder))
    else:
        entry = type("Entry", (), {"pw_dir": str(folder)})()
        monkeypatch.setattr("drumline.hosts.packing.folders.pwd.getpwuid", lambda _: entry)

    async def scenario(harness: ServerHarness) -> None:
        good = folder / "code"
        good.mkdir()
        (good / "train.py").write_text("x")
        other = await harness.create(workdir=str(good), checkpoint="gs://lab/checkpoints")
        await harness.service.verb(other, "delete", {})
        await harness.reaches(other, "CANCELLED")
        home = spec_for(folder)
        archives = set((harness.supervisor.folders.code).iterdir())
        for attempt in (
            harness.service.plan(home),
            harness.service.create(home, {}, "lab"),
            harness.service.create(home, {}, "lab", {"from": other}),
            harness.service.verb(other, "resume", {"spec": home}),
        ):
            with pytest.raises(RequestError, match="put the job file in a folder of its own"):
                await attempt
        assert len(harness.service.overview()) == 1
        assert set((harness.supervisor.folders.code).iterdir()) == archives
        none = await harness.service.create(home | {"workdir": None}, {}, "lab")
        assert none["code"] is None

    run_scenario(tmp_path / "home", scenario)


def test_a_job_file_in_the_home_folder_is_rejected_by_the_client(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    path = folder / "job.yaml"
    path.write_text("accelerator: v4-8\nrun: x\n")
    with pytest.raises(SpecError, match=r"workdir: .* is your home folder, .*set workdir:"):
        load(path)
    path.write_text("accelerator: v4-8\nrun: x\nworkdir: none\n")
    assert load(path).workdir is None
    path.write_text("accelerator: v4-8\nrun: x\nworkdir: deploy\n")
    assert load(path).workdir == folder / "deploy"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("[gone.pem]", "job.yaml:3  include: 'gone.pem' matches no file in workdir"),
        ("../id_rsa", "include: '../id_rsa' is not inside workdir"),
        ("/etc/passwd", "include: '/etc/passwd' is not inside workdir"),
        ("['!a']", "include: '!a' is not a file"),
        ("[a, a]", "include: a is listed twice"),
    ],
)
def test_an_include_without_matches_is_an_error_with_its_line(
    folder: Path, written: str, sentence: str
) -> None:
    path = folder / "job.yaml"
    path.write_text(f"accelerator: v4-8\nrun: x\ninclude: {written}\n")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert sentence in str(caught.value)
    assert "job.yaml:3" in str(caught.value)


def test_requirements_that_would_not_be_sent_are_rejected(tmp_path: Path, folder: Path) -> None:
    (folder / "requirements.txt").write_text("jax")
    (folder / "requirements.txt").chmod(0o600)

    async def scenario(harness: ServerHarness) -> None:
        spec = spec_for(folder, python={"kind": "uv", "requirements": "requirements.txt"})
        with pytest.raises(RequestError, match=r"requirements\.txt would not be sent"):
            await harness.service.plan(spec)
        included = spec | {"include": ["requirements.txt"]}
        assert "would send 2 files" in (await harness.service.plan(included))["lines"][1]

    run_scenario(tmp_path / "home", scenario)


FILE_CALLS = ("open", "stat", "lstat", "listdir", "scandir", "readlink", "read", "access")


class Interference:
    """Does something to the user's files at a given call of the operating system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, act: Any) -> None:
        self.calls, self.done, checking = 0, False, False

        def wrap(function: Any) -> Any:
            def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
                nonlocal checking
                if checking or self.done:
                    return function(path, *args, **kwargs)
                descriptor = path if isinstance(path, int) else kwargs.get("dir_fd")
                place = path if descriptor is None else f"/proc/self/fd/{descriptor}"
                checking = True  # `realpath` itself calls lstat and readlink
                try:
                    inside = os.path.realpath(str(place)).startswith(str(folder))
                finally:
                    checking = False
                if inside:
                    self.calls += 1
                    if self.calls == at:
                        self.done = True
                        act()
                return function(path, *args, **kwargs)

            return call

        for name in FILE_CALLS:
            monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def raise_(code: int) -> None:
    raise OSError(code, os.strerror(code), "train.py")


@pytest.mark.parametrize(
    "event",
    ["vanish", "replace", *rare("ENOENT", "EACCES", "EIO", "ESTALE", "ELOOP", "ENAMETOOLONG")],
)
def test_files_that_change_while_they_are_packed_give_a_sentence_or_a_job(
    tmp_path: Path, folder: Path, event: str
) -> None:
    """Every call of the operating system fails once, or finds the files gone."""

    async def scenario(harness: ServerHarness) -> None:
        aside = tmp_path / "aside"

        def act() -> None:
            if event == "vanish":
                folder.rename(aside)
            elif event == "replace":
                (folder / "train.py").unlink()
                (folder / "train.py").symlink_to("/etc")
                (folder / "deploy").rename(folder / "moved")
                (folder / "deploy").write_text("now a file")
            else:
                raise_(getattr(errno, event))

        at, done = 0, True
        while done:
            at += 1
            jobs = len(harness.service.overview())
            copy = tmp_path / f"copy-{at}"
            shutil.copytree(folder, copy, symlinks=True)
            with pytest.MonkeyPatch.context() as patch:
                interference = Interference(patch, folder, at, act)
                created, message = 1, ""
                try:
                    await harness.service.create(spec_for(folder), {}, "lab")
                except RequestError as error:
                    created, message = 0, str(error)
            assert "\n" not in message
            done = interference.done
            assert len(harness.service.overview()) == jobs + created
            assert not list(harness.service.folders.code.glob(".packing-*"))
            if event == "vanish" and done:
                assert created == 0, "a job without its code"
            for path in (folder, aside):
                shutil.rmtree(path, ignore_errors=True)
            copy.rename(folder)
        assert at > 20

    run_scenario(tmp_path / "home", scenario)

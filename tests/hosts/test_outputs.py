"""Outputs are copied from hosts by the real agent, and hosts cannot write anywhere else."""

import asyncio
import base64
import errno
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent import outputs as agent_outputs
from drumline.hosts.agent import wire
from drumline.hosts.code import pack
from drumline.hosts.connection import AgentError
from drumline.hosts.outputs import CopyError, OutputFolder
from drumline.hosts.protocol import HostCopy, OutputTarget
from drumline.hosts.session import HostPhase, SliceSession
from tests.hosts.on_hosts import on_hosts, reach, work

from .stand_in import Slice, program

RESULTS = ["results/", "*.png"]


def target(slice_: Slice, max_bytes: int = 10**9) -> OutputTarget:
    return OutputTarget(slice_.folder / "kept" / "000012", slice_.folder / "drafts", max_bytes)


def kept(slice_: Slice) -> dict[str, bytes]:
    folder = slice_.folder / "kept" / "000012"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def copy(
    session: SliceSession,
    folder: OutputTarget,
    paths: Sequence[str] = RESULTS,
    seconds: float = 60,
) -> Mapping[int, HostCopy]:
    return (await session.copy_outputs(paths, folder, seconds)).hosts


async def ended(slice_: Slice, run: str, **parts: Any) -> SliceSession:
    session = slice_.session(program(run=run, **parts))
    session.start()
    await reach(session, HostPhase.EXITED)
    return session


def test_the_named_files_of_every_host_are_copied(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_,
            "mkdir -p results/deep; echo $DRUMLINE_HOST >results/deep/x.csv; : >results/empty\n"
            "echo picture >a.png; echo other >a.txt; head -c 200000 /dev/zero >results/zeros",
        )
        copies = await copy(session, target(slice_))
        assert [(c.files, c.error, c.problems) for c in copies.values()] == [(4, "", [])] * 2
        expected = {"a.png": b"picture\n", "results/empty": b"", "results/zeros": bytes(200000)}
        assert kept(slice_) == {
            f"host-{host}/{name}": content
            for host in (0, 1)
            for name, content in {**expected, "results/deep/x.csv": b"%d\n" % host}.items()
        }
        assert not list((slice_.folder / "drafts").iterdir())

    on_hosts(tmp_path, 2, story)


PATTERNS: tuple[tuple[list[str], set[str]], ...] = (
    (["logs"], {"logs/a.txt", "logs/sub/b.txt", "logs/.hidden"}),
    (["logs/*.txt"], {"logs/a.txt"}),
    (["**/*.txt"], {"logs/a.txt", "logs/sub/b.txt", "top.txt"}),
    (["**"], {"logs/a.txt", "logs/sub/b.txt", "logs/.hidden", "top.txt"}),
    (["l*/s?b/"], {"logs/sub/b.txt"}),
    (["*"], {"logs/a.txt", "logs/sub/b.txt", "logs/.hidden", "top.txt"}),
    (["top.txt", "top.*", "nothing"], {"top.txt"}),
)


def test_patterns(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_,
            "mkdir -p logs/sub; echo >logs/a.txt; echo >logs/sub/b.txt; echo >top.txt;"
            "echo >logs/.hidden; echo >.secret",
        )
        for paths, names in PATTERNS:
            await copy(session, target(slice_), paths)
            assert {name.removeprefix("host-0/") for name in kept(slice_)} == names, paths
            shutil.rmtree(slice_.folder / "kept")

    on_hosts(tmp_path, 1, story)


def test_patterns_for_folders_in_a_row_read_each_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/x.txt").touch()
    folders_read = []
    real = agent_outputs.Listing.entries

    def entries(listing: agent_outputs.Listing, name: str) -> list[str]:
        folders_read.append(name)
        return real(listing, name)

    monkeypatch.setattr(agent_outputs.Listing, "entries", entries)
    listing = agent_outputs.Listing(str(tmp_path))
    names = list(agent_outputs.expand(listing, "", ["**"] * 12 + ["x.txt"]))
    assert names == ["a/b/c/x.txt"]
    assert len(folders_read) <= 8


def test_only_changed_files_are_copied_again(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(slice_, "mkdir results; echo 1 >results/a; echo 1 >results/b")
        assert (await copy(session, target(slice_)))[0].files == 2
        assert (await copy(session, target(slice_)))[0].files == 0
        folder = work(slice_.hosts[0].home) / "results"
        (folder / "a").write_text("2\n")
        (folder / "b").unlink()
        assert (await copy(session, target(slice_)))[0].files == 1
        assert kept(slice_) == {"host-0/results/a": b"2\n", "host-0/results/b": b"1\n"}

    on_hosts(tmp_path, 1, story)


def test_unchanged_files_of_the_code_are_no_outputs(tmp_path: Path) -> None:
    """On a new slice, they would replace newer files of an earlier attempt."""
    code = tmp_path / "code"
    (code / "results").mkdir(parents=True)
    for name in ("old.csv", "extended.csv"):
        (code / "results" / name).write_text("from the last run\n")
    archive = pack(code, tmp_path / "archives")

    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_,
            "echo more >>results/extended.csv",
            archive=archive.path,
            archive_sha=archive.sha256,
        )
        await copy(session, target(slice_))
        assert kept(slice_) == {"host-0/results/extended.csv": b"from the last run\nmore\n"}

    on_hosts(tmp_path, 1, story)


def test_links_out_of_the_folder_are_reported_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")

    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_,
            f"mkdir results; ln -s {outside}/secret results/file; ln -s {outside} results/folder\n"
            f"ln -s {outside}/secret a.png; echo 1 >results/real; ln -s real results/inside\n"
            "ln -s . results/loop; mkfifo results/pipe",
        )
        result = (await copy(session, target(slice_)))[0]
        assert kept(slice_) == {"host-0/results/real": b"1\n", "host-0/results/inside": b"1\n"}
        reason = "a link to a file outside the folder of the program"
        assert sorted(result.problems) == [
            ("a.png", reason),
            ("results/file", reason),
            ("results/folder", reason),
            ("results/pipe", "not a file"),
        ]
        assert result.left_out == 4

    on_hosts(tmp_path, 1, story)


def test_a_link_in_the_place_of_the_named_folder_is_reported(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(slice_, f"mkdir {tmp_path}/big; ln -s {tmp_path}/big results")
        result = (await copy(session, target(slice_)))[0]
        assert [name for name, _ in result.problems] == ["results"]

    on_hosts(tmp_path, 1, story)


@pytest.mark.parametrize("paths", [["results/"], ["results/*.csv", "**/*.csv"]])
def test_folders_that_are_too_deep_do_not_lose_the_other_files(
    tmp_path: Path, paths: list[str]
) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_,
            'mkdir results; cd results; echo 1 >a.csv; python3 -c "import os\n'
            "for _ in range(1200): os.mkdir('d'); os.chdir('d')\n"
            "open('b.csv', 'w').close()\"",
        )
        result = (await copy(session, target(slice_), paths))[0]
        shutil.move(work(slice_.hosts[0].home) / "results" / "d", tmp_path / "deep")
        subprocess.run(["/bin/rm", "-r", tmp_path / "deep"], check=True)
        assert (result.files, result.error) == (1, "")
        assert kept(slice_) == {"host-0/results/a.csv": b"1\n"}

    on_hosts(tmp_path, 1, story)


def test_files_beyond_the_limit_are_reported_and_small_files_come_first(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(
            slice_, "mkdir results; head -c 900000 /dev/zero >results/a; echo 1 >results/b"
        )
        result = (await copy(session, target(slice_, max_bytes=500_000)))[0]
        assert kept(slice_) == {"host-0/results/b": b"1\n"}
        [(name, reason)] = result.problems
        assert name == "results/a"
        assert "do not fit into the limit" in reason
        assert "output_megabytes" in reason

    on_hosts(tmp_path, 1, story)


def test_a_lost_connection_delays_a_copy_only(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(slice_, "mkdir results; head -c 9000000 /dev/zero >results/a")
        copying = asyncio.create_task(copy(session, target(slice_)))
        drafts = slice_.folder / "drafts"
        while not (drafts.is_dir() and list(drafts.iterdir())) and not copying.done():
            await asyncio.sleep(0.001)
        slice_.hosts[0].cut()
        result = (await copying)[0]
        assert (result.files, result.error) == (1, "")
        assert kept(slice_) == {"host-0/results/a": bytes(9000000)}

    on_hosts(tmp_path, 1, story)


def test_a_host_that_is_gone_is_reported_and_the_others_are_copied(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = await ended(slice_, "mkdir results; echo 1 >results/a")
        await slice_.hosts[1].stop()
        copies = await copy(session, target(slice_))
        assert copies[1].error == "the host cannot be reached"
        assert kept(slice_) == {"host-0/results/a": b"1\n"}

    on_hosts(tmp_path, 2, story)


# --- hosts that send anything -----------------------------------------------------------------


class Liar:
    """An agent with any answers."""

    def __init__(
        self, files: Sequence[tuple[str, int, int]], chunks: Sequence[wire.OutputChunk] = ()
    ) -> None:
        self.files, self.chunks = tuple(files), chunks
        self.requested: list[str] = []

    async def ask(self, *_: object, **__: object) -> wire.OutputList:
        return wire.OutputList(files=self.files)

    async def send_outputs(
        self, _: str, files: Sequence[tuple[str, int]]
    ) -> AsyncIterator[wire.OutputChunk]:
        self.requested = [name for name, _ in files]
        for chunk in self.chunks:
            yield chunk


def chunk(data: bytes, index: int = 0) -> wire.OutputChunk:
    return wire.OutputChunk(index=index, data=base64.b64encode(data).decode())


async def copy_from(agent: Any, tmp_path: Path) -> HostCopy:
    folder = OutputFolder(OutputTarget(tmp_path / "kept", tmp_path / "drafts", 10**6))
    await folder.begin()
    result = HostCopy()
    await folder.copy(agent, "jobs/1", ["results"], 0, result)
    return result


class CountingLiar(Liar):
    """An agent whose messages have all arrived, so that nothing else suspends the copy."""

    rounds = 0
    """The number of times that another task ran between the first and the last message."""

    async def send_outputs(
        self, _: str, files: Sequence[tuple[str, int]]
    ) -> AsyncIterator[wire.OutputChunk]:
        async def count() -> None:
            while True:
                self.rounds += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for index in range(len(files)):
            yield chunk(b"x", index)
        counting.cancel()


def test_a_copy_of_many_files_lets_other_tasks_run(tmp_path: Path) -> None:
    agent = CountingLiar([(f"results/{number}", 1, 1) for number in range(100)])
    assert asyncio.run(copy_from(agent, tmp_path)).files == 100
    assert agent.rounds >= 99


BAD_NAMES = [
    "/etc/passwd",
    "../host-1/a",
    "a/../../b",
    "..",
    ".",
    "",
    "a//b",
    "a/",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "x" * 250,
    "/".join(["x" * 100] * 11),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leaves_the_folder_of_the_host_is_not_requested(
    tmp_path: Path, name: str
) -> None:
    agent = Liar([(name, 1, 1)])
    result = asyncio.run(copy_from(agent, tmp_path))
    assert agent.requested == []
    assert result.left_out == 1
    assert all(text.isprintable() for text in result.problems[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "time"), [(-1, 1), (1 << 60, 1), (1, -1), (1, 1 << 70)])
def test_an_invalid_size_or_time_is_not_requested(tmp_path: Path, size: int, time: int) -> None:
    agent = Liar([("a", size, time)])
    assert asyncio.run(copy_from(agent, tmp_path)).left_out == 1
    assert agent.requested == []


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [wire.OutputChunk(done=True)],
        [chunk(b"12345")],
        [chunk(b"1"), chunk(b"2345")],
        [chunk(b"1"), chunk(b"")],
        [chunk(b"1"), wire.OutputChunk(done=True)],
        [chunk(b"1234", index=1)],
        [chunk(b"1234", index=-1)],
        [wire.OutputChunk(index=0, data="not base64!")],
    ],
)
def test_content_of_another_size_replaces_nothing(
    tmp_path: Path, chunks: Sequence[wire.OutputChunk]
) -> None:
    old = tmp_path / "kept" / "host-0" / "a"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    with pytest.raises(AgentError):
        asyncio.run(copy_from(Liar([("a", 4, 1)], chunks), tmp_path))
    assert old.read_text() == "old"
    assert list((tmp_path / "drafts").iterdir()) == []


def test_a_file_that_fails_does_not_stop_the_next_one(tmp_path: Path) -> None:
    chunks = [chunk(b"1"), wire.OutputChunk(index=0, error="it became\nshorter"), chunk(b"22", 1)]
    result = asyncio.run(copy_from(Liar([("a", 2, 1), ("b", 2, 1)], chunks), tmp_path))
    assert result.problems == [("a", "it became?shorter")]
    assert (tmp_path / "kept" / "host-0" / "b").read_bytes() == b"22"


def test_a_folder_in_the_place_of_a_file_is_kept_and_reported(tmp_path: Path) -> None:
    (tmp_path / "kept" / "host-0" / "a").mkdir(parents=True)
    (tmp_path / "kept" / "host-0" / "b").write_text("old")
    chunks = [chunk(b"1"), chunk(b"2", 1)]
    result = asyncio.run(copy_from(Liar([("a", 1, 1), ("b/c", 1, 1)], chunks), tmp_path))
    assert [name for name, _ in result.problems] == ["a", "b/c"]
    assert (tmp_path / "kept" / "host-0" / "b").read_text() == "old"


def test_a_full_disk_of_this_machine_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(CopyError, match="this machine cannot store more: no space left on device"):
        asyncio.run(copy_from(Liar([("a", 1, 1)], [chunk(b"1")]), tmp_path))
    assert not list((tmp_path / "drafts").iterdir())

"""The packed code: its files, and equal archives for equal files."""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from drumline.hosts.code import CodeError, measure, pack
from drumline.hosts.packing.listing import files_below
from drumline.hosts.packing.rules import EARLIEST_TIME

GIT = shutil.which("git")
NEEDS_GIT = pytest.mark.skipif(GIT is None, reason="needs git")


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    return folder


def git(folder: Path, *words: str) -> None:
    assert GIT is not None
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([GIT, "-C", str(folder), *who, *words], check=True, capture_output=True)


def packed(folder: Path, into: Path) -> list[str]:
    with tarfile.open(pack(folder, into).path) as tar:
        return tar.getnames()


def test_the_same_files_with_other_times_give_the_same_archive(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", "b.py", "a/c.py", "a.py")
    two = fill(tmp_path / "two", "a.py", "a/c.py", "b.py")
    os.utime(two / "a.py", (1, 1))
    first, second = pack(one, tmp_path / "code"), pack(two, tmp_path / "code")
    assert first == second
    assert first.path.name == f"{first.sha256}.tar.gz"
    assert (first.files, first.bytes) == (3, len("this is b.py\nthis is a/c.py\nthis is a.py\n"))
    assert list((tmp_path / "code").iterdir()) == [first.path]
    (two / "a.py").write_text("changed")
    assert pack(two, tmp_path / "code").sha256 != first.sha256


def test_names_modes_and_links_are_kept(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "run.sh", "data/ä b'c\n.txt", "x" * 120 + "/long.py")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("data")
    (folder / "absolute").symlink_to(folder / "run.sh")
    with tarfile.open(pack(folder, tmp_path / "out").path) as tar:
        members = {member.name: member for member in tar.getmembers()}
    assert members["run.sh"].mode == 0o755
    assert members["data/ä b'c\n.txt"].mode == 0o644
    assert members["link"].linkname == "data"
    assert members["absolute"].linkname == "run.sh"
    assert {(member.uid, member.uname) for member in members.values()} == {(0, "")}


def test_files_keep_their_times_but_none_before_1980(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "new.py", "old.py")
    os.utime(folder / "new.py", (1_700_000_000.5, 1_700_000_000.5))
    os.utime(folder / "old.py", (0, 0))
    archive = pack(folder, tmp_path / "out")
    with tarfile.open(archive.path) as tar:
        times = {member.name: member.mtime for member in tar.getmembers()}
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert times == {"new.py": 1_700_000_000, "old.py": EARLIEST_TIME}
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as zipped:
        for name in times:
            zipped.write(tmp_path / "unpacked" / name)


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "a/../../secret"])
def test_a_link_that_points_outside_is_rejected(tmp_path: Path, target: str) -> None:
    folder = fill(tmp_path / "code", "a/b.py")
    (folder / "link").symlink_to(target)
    with pytest.raises(CodeError, match="the link link points out of the folder"):
        pack(folder, tmp_path / "out")


def test_the_error_for_too_much_code_names_the_largest_part(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "train.py", "data/a", "data/b")
    (folder / "data" / "a").write_bytes(b"x" * 2_000_000)
    with pytest.raises(
        CodeError, match=r"more than 1\.0 MB; .* data with 2\.0 MB: add it to \.drumlin"
    ):
        pack(folder, tmp_path / "out", max_bytes=1_000_000)


def test_a_missing_folder_is_a_code_error(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="is not a folder"):
        pack(tmp_path / "nowhere", tmp_path / "out")


@NEEDS_GIT
def test_a_checkout_sends_the_files_that_git_keeps(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "kept.py", "new.py", "gone.py", "secret.env", "out/x.bin")
    git(folder, "init")
    (folder / ".gitignore").write_text("*.env\nout/\n")
    git(folder, "add", "kept.py", "gone.py")
    git(folder, "commit", "-m", "one")
    (folder / "gone.py").unlink()
    fill(folder, ".venv/bin/python", "__pycache__/kept.pyc")
    inner = fill(folder / "inner", "library.py", "junk.o")
    git(inner, "init")
    (inner / ".gitignore").write_text("*.o\n")
    git(inner, "add", "library.py")
    git(inner, "commit", "-m", "one")
    assert packed(folder, tmp_path / "out") == [
        ".gitignore",
        "inner/.gitignore",
        "inner/library.py",
        "kept.py",
        "new.py",
    ]


@NEEDS_GIT
def test_a_folder_that_an_outer_checkout_ignores_is_still_sent(tmp_path: Path) -> None:
    outer = fill(tmp_path / "outer", "x.py", "mine/train.py", "mine/big.bin")
    git(outer, "init")
    (outer / ".gitignore").write_text("mine/\n")
    (outer / "mine" / ".gitignore").write_text("*.bin\n")
    assert packed(outer / "mine", tmp_path / "out") == [".gitignore", "train.py"]


@pytest.mark.parametrize("checkout", [False, pytest.param(True, marks=NEEDS_GIT)])
def test_a_drumlineignore_excludes_files_and_can_include_defaults(
    tmp_path: Path, checkout: bool
) -> None:
    names = ("train.py", "data/a.npz", "data/keep.csv", "lib/data/b.npz", "lib/x.py", "lib/y.tmp")
    folder = fill(tmp_path / "code", *names, "venv/bin/pip", "lib/node_modules/x.js", "a/.tox/x")
    (folder / ".drumlineignore").write_text("/data/*\n!data/keep.csv\n!node_modules/\n")
    (folder / "lib" / ".drumlineignore").write_text("*.tmp\n")
    if checkout:
        git(folder, "init")
        git(folder, "add", "--all")
    assert packed(folder, tmp_path / "out") == [
        ".drumlineignore", "data/keep.csv", "lib/.drumlineignore", "lib/data/b.npz",
        "lib/node_modules/x.js", "lib/x.py", "train.py",
    ]  # fmt: skip


INVALID_PATTERNS = ["!", "[z-a]", "a\\", "\\"]


@pytest.mark.parametrize("line", INVALID_PATTERNS)
def test_a_line_that_is_no_pattern_is_ignored_in_a_gitignore_as_git_does(
    tmp_path: Path, line: str
) -> None:
    folder = fill(tmp_path / "code", "train.py", "a.tmp", "b.log")
    (folder / ".gitignore").write_text(f"*.tmp\n{line}\n*.log\n")
    assert packed(folder, tmp_path / "out") == [".gitignore", "train.py"]


@pytest.mark.parametrize("line", INVALID_PATTERNS)
def test_a_line_that_is_no_pattern_is_an_error_in_a_drumlineignore(
    tmp_path: Path, line: str
) -> None:
    """The user expects that its files are not sent."""
    folder = fill(tmp_path / "code", "train.py", "lib/x.py")
    (folder / "lib" / ".drumlineignore").write_text(f"*.tmp\n{line}\n")
    with pytest.raises(CodeError) as error:
        pack(folder, tmp_path / "out")
    assert str(error.value) == (
        f"code: lib/.drumlineignore:2  {line} is not a valid pattern; correct or remove it"
    )


def test_the_largest_files_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "train.py", "a/small.bin", "b.bin", "c.bin", "d.bin", "e.bin")
    for megabytes, name in enumerate(("a/small.bin", "b.bin", "c.bin", "d.bin", "e.bin")):
        (folder / name).write_bytes(b"x" * (megabytes * 1_000_000))
    largest = (("e.bin", 4_000_000), ("d.bin", 3_000_000), ("c.bin", 2_000_000))
    assert measure(folder).largest == largest
    assert pack(folder, tmp_path / "out").largest == largest


def test_large_files_are_stored_once_beside_the_archive(tmp_path: Path) -> None:
    folder = fill(tmp_path / "code", "train.py")
    for name, data in {"text": b"abc\n" * 500_000, "copy": b"abc\n" * 500_000}.items():
        (folder / name).write_bytes(data)
    (folder / "random").write_bytes(os.urandom(2_000_000))
    first = pack(folder, tmp_path / "out")
    assert (first.files, first.bytes, len(first.large_files)) == (4, 6_000_017, 2)
    large = [tmp_path / "out" / f"{sha}.gz" for sha in first.large_files]
    contents = {path.name: gzip.decompress(path.read_bytes()) for path in large}
    assert contents.keys() == {f"{hashlib.sha256(d).hexdigest()}.gz" for d in contents.values()}
    assert first.path.stat().st_size < 2000
    sizes = sorted(path.stat().st_size for path in large)
    assert sizes[0] < 20_000, "what can be compressed is"
    assert sizes[1] > 2_000_000, "and the rest is not"
    (folder / "train.py").write_text("changed")
    second = pack(folder, tmp_path / "out")
    assert second.large_files == first.large_files
    (folder / "random").write_bytes(os.urandom(2_000_000))
    assert pack(folder, tmp_path / "out").sha256 != second.sha256
    assert not list((tmp_path / "out").glob(".*"))


@NEEDS_GIT
@pytest.mark.parametrize("cause", ["another owner", "damaged"])
def test_ignored_files_of_a_checkout_are_not_sent_even_if_git_cannot_list_it(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("team/code/train.py", "team/code/notes.txt", "team/code/dump.sql", "team/code/x.log")
    top = fill(tmp_path / "top", *names)
    git(top, "init")
    (top / ".gitignore").write_text("notes.txt\n")
    (top / "team" / ".gitignore").write_text("code/*.sql\n")
    (top / ".git" / "info" / "exclude").write_text("*.log\n")
    if cause == "another owner":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    else:
        (top / ".git" / "HEAD").unlink()
    assert packed(top / "team" / "code", tmp_path / "out") == ["train.py"]


@NEEDS_GIT
def test_a_folder_that_a_checkout_ignores_is_sent_although_git_cannot_list_it(
    tmp_path: Path,
) -> None:
    outer = fill(tmp_path / "outer", "scratch/mine/train.py", "scratch/mine/x.log")
    git(outer, "init")
    (outer / ".git" / "HEAD").unlink()
    (outer / ".gitignore").write_text("/scratch/\n*.log\n")
    assert packed(outer / "scratch" / "mine", tmp_path / "out") == ["train.py", "x.log"]


IGNORED = r"""
# a comment
*.log
!keep.log
/top.txt
build/
docs/*.html
**/cache
a/**/z
deep/**
[ab].dat
[!x]only
\#literal
under_*
!build/never
spaced\{}
""".replace("{}", " ")

NAMES = [
    "one.log", "keep.log", "sub/two.log", "sub/keep.log", "top.txt", "sub/top.txt",
    "build/x", "sub/build/y", "sub2/build", "docs/a.html", "docs/sub/b.html", "cache/x",
    "p/cache/y", "p/q/cache", "a/z", "a/b/z", "a/b/c/z", "a/b/zz", "deep/x/y", "a.dat", "c.dat",
    "yonly", "xonly", "#literal", "spaced ", "under_x", "own/keep.txt", "own/drop.txt",
    "own/sub/drop.txt", "build/never", "plain.py", "UPPER.LOG",
]  # fmt: skip


def test_gitignore_files_are_applied_without_git(tmp_path: Path) -> None:
    if GIT is None:
        pytest.skip("needs git, as the judge")
    folder = fill(tmp_path / "code", *NAMES)
    (folder / ".gitignore").write_text(IGNORED)
    (folder / "own" / ".gitignore").write_text("drop.txt\n!/sub/drop.txt\n")
    packed_files = sorted(files_below(folder))
    git(folder, "init")
    listed = subprocess.run(
        [GIT, "-C", str(folder), "ls-files", "-o", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
    ).stdout
    assert packed_files == sorted(name for name in listed.decode().split("\0") if name)
    assert {"plain.py", "keep.log", "xonly", "own/sub/drop.txt"} <= set(packed_files)


def test_only_the_sources_of_the_bundled_package_are_sent(tmp_path: Path) -> None:
    """A source checkout that is installed in place may contain other files too."""
    package = tmp_path / "src" / "drumline"
    (package / "jobs").mkdir(parents=True)
    for name in ("__init__.py", "py.typed", "jobs/spec.py", ".env", "id_ed25519", "notes.txt"):
        (package / name).write_text("planted")
    (tmp_path / "key").write_text("planted")
    (package / "link.py").symlink_to(tmp_path / "key")
    (package / "folder").symlink_to(tmp_path)
    packed = pack(None, tmp_path / "code", package=package)
    with tarfile.open(packed.path) as tar:
        names = {name.removeprefix(".drumline/python/drumline/") for name in tar.getnames()}
    assert names == {"__init__.py", "py.typed", "jobs/spec.py"}

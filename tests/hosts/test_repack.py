"""Archives of older versions are packed again without their secrets."""

import io
import tarfile
from pathlib import Path

import pytest

from drumline.hosts.code import CodeError
from drumline.hosts.packing.repack import repack
from tests.hosts.packing_table import openssh_key


def old_archive(folder: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    path = folder / "old.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return path


def test_the_archive_of_a_home_folder_is_repacked_without_secrets(tmp_path: Path) -> None:
    key = openssh_key()
    old = old_archive(
        tmp_path / "code",
        {
            ".drumline/jobs.db": "x",
            ".drumline/ssh/id_ed25519": key,
            ".drumline/secrets/000001.json": "{}",
            ".drumline/code/abc.tar.gz": "x",
            ".drumline/python/drumline/__init__.py": "x = 1",
            ".ssh/id_ed25519": key,
            ".env": "A=1",
            "train.py": "x = 1",
            "src/model.py": "x = 1",
            "deploy": key,
        },
        {"link": "deploy", "good": "train.py", "state": ".drumline/jobs.db"},
    )
    renewed = repack(old)
    assert renewed is not None
    with tarfile.open(renewed.path) as tar:
        members = {member.name: member for member in tar.getmembers()}
        data = tar.extractfile("train.py")
        assert data is not None
        assert data.read() == b"x = 1"
    assert set(members) == {
        ".drumline/python/drumline/__init__.py", "train.py", "src/model.py", "good",
    }  # fmt: skip
    assert members["train.py"].mode == 0o755
    assert members["good"].linkname == "train.py"
    assert renewed.path.name == f"{renewed.sha256}.tar.gz"
    assert (renewed.files, renewed.bytes) == (3, 10)
    assert {entry.path: entry.reason for entry in renewed.left_out} == {
        ".drumline/": "Drumline's home",
        ".ssh/": "SSH folder",
        ".env": "environment file",
        "deploy": "private key",
        "link": "link to a file that is left out",
        "state": "link to a file that is left out",
    }
    assert repack(renewed.path) is None


def test_an_archive_without_secrets_is_not_repacked(tmp_path: Path) -> None:
    old = old_archive(tmp_path / "code", {"train.py": "x = 1", "notes/.env.example": "A="})
    assert repack(old) is None
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("damage", ["gone", "cut short", "no archive"])
def test_an_unreadable_archive_is_a_code_error(tmp_path: Path, damage: str) -> None:
    old = old_archive(tmp_path / "code", {"train.py": openssh_key() * 50})
    data = old.read_bytes()
    match damage:
        case "gone":
            old.unlink()
        case "cut short":
            old.write_bytes(data[: len(data) // 2])
        case "no archive":
            old.write_bytes(b"hello")
    with pytest.raises(CodeError, match="cannot be read"):
        repack(old)

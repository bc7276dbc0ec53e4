"""Removes secrets from archives that an older version has packed.

Older versions also packed secrets, and the archive of a job is sent again to each new slice. The
members are checked by their names and contents, like files. Their permissions were not kept.
"""

import posixpath
import tarfile
from collections import defaultdict
from pathlib import Path

from drumline.hosts.code import Archive, ArchiveWriter, CodeError, is_source
from drumline.hosts.packing.contents import SecretScan
from drumline.hosts.packing.folders import DRUMLINE_HOME, looks_like_home
from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.packing.names import secret_file, secret_folder
from drumline.hosts.packing.rules import LeftOut
from drumline.hosts.packing.selection import READ_BYTES


def repack(archive: Path) -> Archive | None:
    """Write an archive without secrets beside an old one. Return None if the old one has none.

    Raises CodeError if the old one cannot be read.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            left_out = _left_out(tar, members)
            if not left_out:
                return None
            with ArchiveWriter(archive.parent) as writer:
                files = size = 0
                for member in members:
                    if member.name in left_out:
                        continue
                    writer.add(member, tar.extractfile(member) if member.isreg() else None)
                    if not member.name.startswith(f"{PACKAGE_FOLDER}/"):
                        files += 1
                        size += member.size
                path, sha = writer.finish()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise CodeError(f"code: {archive} cannot be read: {error}") from None
    reasons = {entry.path: entry for entry in left_out.values()}
    return Archive(path, sha, files, size, tuple(reasons[path] for path in sorted(reasons)))


def _left_out(tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> dict[str, LeftOut]:
    """Return the members to leave out, by their names."""
    entries: dict[str, set[str]] = defaultdict(set)
    for member in members:
        components = member.name.split("/")
        for depth, component in enumerate(components):
            entries["/".join(components[:depth])].add(component)
    homes = {folder for folder, names in entries.items() if looks_like_home(names)}
    left_out = {}
    for member in members:
        # The folder of the bundled package has no files of the user.
        if member.name.startswith(f"{PACKAGE_FOLDER}/drumline/") and is_source(member.name):
            continue
        entry = _check_folder(member.name, homes) or _check_file(tar, member)
        if entry is not None:
            left_out[member.name] = entry
    secret_targets = set(left_out)
    for member in members:
        if member.issym() and member.name not in left_out:
            folder = member.name.rpartition("/")[0]
            target = posixpath.normpath(posixpath.join(folder, member.linkname))
            if target in secret_targets or _check_folder(f"{target}/", homes):
                left_out[member.name] = LeftOut(member.name, "link to a file that is left out")
    return left_out


def _check_folder(name: str, homes: set[str]) -> LeftOut | None:
    components = name.split("/")
    for depth in range(len(components)):
        folder = "/".join(components[:depth])
        if folder in homes:
            return LeftOut(f"{folder}/", DRUMLINE_HOME)
        if depth and (reason := secret_folder(components[:depth])):
            return LeftOut(f"{folder}/", reason)
    return None


def _check_file(tar: tarfile.TarFile, member: tarfile.TarInfo) -> LeftOut | None:
    components = member.name.split("/")
    scan = SecretScan(components)
    file = tar.extractfile(member) if member.isreg() else None
    while file is not None and (block := file.read(READ_BYTES)):
        scan.feed(block)
    reason = scan.reason() or secret_file(components)
    return LeftOut(member.name, reason) if reason else None

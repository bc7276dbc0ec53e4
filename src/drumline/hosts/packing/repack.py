"""Archives that an older version packed, without what the packing rules leave out today.

Older versions packed secrets too, and a living job's archive is sent again to each new slice. The
members are judged by their names and contents, as files are; their permissions were not kept.
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
    """Write a new archive beside an old one, without secrets; None if the old one holds none.

    Raises CodeError if the old one cannot be read.
    """
    try:
        with tarfile.open(archive) as old:
            members = old.getmembers()
            left_out = _left_out(old, members)
            if not left_out:
                return None
            with ArchiveWriter(archive.parent) as writer:
                files = total = 0
                for member in members:
                    if member.name in left_out:
                        continue
                    writer.tar.addfile(member, old.extractfile(member) if member.isreg() else None)
                    if not member.name.startswith(f"{PACKAGE_FOLDER}/"):
                        files += 1
                        total += member.size
                path, sha = writer.finish()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise CodeError(f"code: {archive} cannot be read: {error}") from None
    reasons = {entry.path: entry for entry in left_out.values()}
    return Archive(path, sha, files, total, tuple(reasons[path] for path in sorted(reasons)))


def _left_out(old: tarfile.TarFile, members: list[tarfile.TarInfo]) -> dict[str, LeftOut]:
    """What to leave out, by the names of the members."""
    entries: dict[str, set[str]] = defaultdict(set)
    for member in members:
        parts = member.name.split("/")
        for depth, part in enumerate(parts):
            entries["/".join(parts[:depth])].add(part)
    homes = {folder for folder, names in entries.items() if looks_like_home(names)}
    left_out = {}
    for member in members:
        # Drumline's own package stands in a folder that no user's file can have.
        if member.name.startswith(f"{PACKAGE_FOLDER}/drumline/") and is_source(member.name):
            continue
        entry = _by_folder(member.name, homes) or _by_file(old, member)
        if entry is not None:
            left_out[member.name] = entry
    secret_targets = set(left_out)
    for member in members:
        if member.issym() and member.name not in left_out:
            folder = member.name.rpartition("/")[0]
            target = posixpath.normpath(posixpath.join(folder, member.linkname))
            if target in secret_targets or _by_folder(f"{target}/", homes):
                left_out[member.name] = LeftOut(member.name, "link to a file that is left out")
    return left_out


def _by_folder(name: str, homes: set[str]) -> LeftOut | None:
    parts = name.split("/")
    for depth in range(len(parts)):
        folder = "/".join(parts[:depth])
        if folder in homes:
            return LeftOut(f"{folder}/", DRUMLINE_HOME)
        if depth and (reason := secret_folder(parts[:depth])):
            return LeftOut(f"{folder}/", reason)
    return None


def _by_file(old: tarfile.TarFile, member: tarfile.TarInfo) -> LeftOut | None:
    parts = member.name.split("/")
    scan = SecretScan(parts)
    file = old.extractfile(member) if member.isreg() else None
    while file is not None and (piece := file.read(READ_BYTES)):
        scan.feed(piece)
    reason = scan.reason() or secret_file(parts)
    return LeftOut(member.name, reason) if reason else None

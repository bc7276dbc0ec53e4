"""The checks of values in a job file about data: buckets, mounts, the checkpoint folder."""

import posixpath
import re
from collections.abc import Mapping

from drumline.jobs.spec.checks import Wrong, each, map_of, shown, text
from drumline.jobs.spec.yaml_lines import Path

SCHEME = "gs://"
# Each mount is a gcsfuse process on every host.
_MOST_MOUNTS = 50
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")
_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def bucket_of(url: str) -> str:
    """`lab-data` of `gs://lab-data/imagenet`."""
    return url.removeprefix(SCHEME).partition("/")[0]


def storage_url(value: object) -> str:
    """`gs://bucket/prefix`, without a slash at its end."""
    url = text(value).strip()
    if not url.startswith(SCHEME):
        raise Wrong(f"{shown(url)} is no bucket; write gs://bucket/folder")
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    if why := _bucket_problem(bucket):
        raise Wrong(f"{shown(bucket)} is no bucket name: {why}")
    prefix = prefix.rstrip("/")
    if not prefix.isprintable() or any(part in {"", ".", ".."} for part in prefix.split("/")[:-1]):
        raise Wrong(
            f"{shown(url)} has a folder with an empty name, a dot for a name, or a line break"
        )
    if prefix.split("/")[-1] in {".", ".."}:
        raise Wrong(f"{shown(url)} has a folder with a dot for a name")
    if len(prefix.encode()) > 1000:
        raise Wrong("has a prefix longer than 1,000 bytes")
    return f"{SCHEME}{bucket}/{prefix}" if prefix else f"{SCHEME}{bucket}"


def _bucket_problem(bucket: str) -> str | None:
    """The rule for bucket names at Google that it breaks."""
    if not _BUCKET.fullmatch(bucket):
        return "lower-case letters, digits, - _ and . make one, a letter or digit at either end"
    if len(bucket) < 3 or len(bucket) > 222 or any(len(part) > 63 for part in bucket.split(".")):
        return "it takes 3 to 63 characters"
    if "" in bucket.split("."):
        return "two dots stand together"
    if _ADDRESS.fullmatch(bucket):
        return "it looks like an IP address"
    if bucket.startswith("goog") or "google" in bucket or "g00gle" in bucket:
        return "Google keeps names with google in them for itself"
    return None


def folder(value: object) -> str:
    """A folder on a host, absolute or below the home folder, without a slash at its end."""
    path = text(value)
    if not path.startswith(("/", "~/")):
        raise Wrong(f"{shown(path)} is neither absolute nor below ~/")
    if not path.isprintable():
        raise Wrong(f"{shown(path)} holds a line break or a character that cannot be printed")
    if ".." in path.split("/"):
        raise Wrong(f"{shown(path)} has .. in it; write the folder it leads to")
    found = posixpath.normpath(path).replace("//", "/")
    if found in {"/", "~"}:
        raise Wrong(f"{shown(path)} is the root or the home folder itself; name a folder in it")
    return found


def mounts(value: object) -> dict[str, str]:
    """Folders on the hosts, and the bucket that is mounted at each."""
    found = map_of(value, "/data: gs://lab-data")
    if len(found) > _MOST_MOUNTS:
        raise Wrong(f"has {len(found):,} mounts; {_MOST_MOUNTS} are the most a host takes on")

    def pair(item: tuple[str, object]) -> tuple[str, str]:
        return folder(item[0]), storage_url(item[1])

    pairs = each(((path, (path, url)) for path, url in found.items()), pair)
    clashes: list[tuple[Path, str]] = [
        ((written,), f"lies in the mount {other}")
        for written, (path, _) in zip(found, pairs, strict=True)
        for other, _ in pairs
        if path != other and is_below(path, other)
    ]
    if len(dict(pairs)) < len(pairs):
        clashes.append(((), "two mounts share a folder"))
    if clashes:
        raise Wrong.all_of(clashes)
    return dict(pairs)


def is_below(path: str, top: str) -> bool:
    """Whether a folder is `top` or inside it."""
    return path == top or path.startswith(f"{top}/")


def mount_over(path: str, mounts: Mapping[str, str]) -> str | None:
    """The mount that a folder is in."""
    return next((top for top in mounts if is_below(path, top)), None)


def checkpoint(value: object) -> str:
    """A folder or a place in a bucket."""
    found = text(value).strip()
    return storage_url(found) if "://" in found else folder(found)

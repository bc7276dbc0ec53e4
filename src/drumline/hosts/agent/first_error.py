"""The first error in a log as one line: the exception and its place in the user's code."""

from __future__ import annotations

import contextlib
import os
import re
import time

from .log import read_log

TRACEBACK = b"Traceback (most recent call last)"

# Texts that end a JAX program without a traceback, or give the cause of the traceback after them.
FATAL = (
    rb"(?m)Traceback \(most recent call last\)|^Fatal Python error|^F\d{4} \d\d:"
    rb"|open\(/dev/(?:vfio|accel)|Couldn.t open iommu group|Failed to initialize TPU system"
    rb"|TPU initialization failed"
    rb"|No accelerator found|libtpu\.so already in use"
)

FRAME = r'^\s+File "(.+?)", line (\d+)'

CHAINED = ("During handling of the above", "The above exception was the direct cause")

LIBRARY_PATH = r"site-packages|dist-packages|/lib/python3|^<"


def summarize_traceback(text: str, work: str) -> str:
    """Return `train.py:214  ValueError: …` for the first traceback in a text.

    Of chained exceptions, return the last.
    """
    lines = text.splitlines()
    head = TRACEBACK.decode()
    start = next((index for index, line in enumerate(lines) if head in line), None)
    if start is None:
        return ""
    is_group = "Exception Group " in lines[start]
    prefix = "" if is_group else lines[start][: lines[start].index(head)]

    def without_prefix(line: str) -> str:
        if is_group:
            return re.sub(r"^\s*[|+] ?", "", line)
        return line[len(prefix) :] if line.startswith(prefix) else line

    frames: list[tuple[str, str]] = []
    index = start + 1
    while index < len(lines):
        line = without_prefix(lines[index])
        index += 1
        frame = re.match(FRAME, line)
        if frame:
            frames.append((frame.group(1), frame.group(2)))
        elif line.startswith(head):
            frames = []
        elif not line.strip() or line[0] in " \t" or line.startswith(CHAINED):
            continue
        else:
            following = [without_prefix(later) for later in lines[index : index + 60]]
            chain = next(
                (n for n, later in enumerate(following) if later.startswith(CHAINED)), None
            )
            if chain is None or any(later.startswith(head) for later in following[:chain]):
                return (source_location(frames, work) + line.strip())[:500]
            index += chain
    return source_location(frames, work) + "error" if frames else ""


def source_location(frames: list[tuple[str, str]], work: str) -> str:
    """Return file and line of the innermost frame in the user's own code."""
    if not frames:
        return ""
    user_frames = [frame for frame in frames if not re.search(LIBRARY_PATH, frame[0])]
    path, line = (user_frames or frames)[-1]
    in_work = path.startswith(work + os.sep)
    return f"{os.path.relpath(path, work) if in_work else os.path.basename(path)}:{line}  "


def describe_error(data: bytes, work: str) -> str:
    """Return the error at the beginning of some output as one line."""
    first_line = data.split(b"\n", 1)[0]
    if TRACEBACK in first_line:
        return summarize_traceback(data.decode("utf-8", "replace"), work)
    return first_line.decode("utf-8", "replace").strip()[:500]


def first_error(data: bytes, work: str) -> str:
    """Return the first error in a complete log as one line; empty if there is none."""
    match = re.search(FATAL, data)
    if match is None:
        return ""
    start = data.rfind(b"\n", 0, match.start()) + 1
    return describe_error(data[start : start + (1 << 18)], work)


class FirstError:
    """Scans the growing log for the moment at which the program began to fail."""

    def __init__(self, folder: str, offset: int) -> None:
        """Start at the offset where the program's output starts."""
        self.folder = folder
        self.position = offset
        self.at: float | None = None
        self.offset = offset

    def scan(self) -> None:
        """Scan the bytes that were written since the last call."""
        if self.at is not None:
            # A program that reports progress after a traceback has caught the exception.
            with contextlib.suppress(OSError):
                heartbeat_at = os.stat(os.path.join(self.folder, "heartbeat.json")).st_mtime
                if heartbeat_at > self.at + 0.5:
                    self.at = None
        for _ in range(16):
            data = read_log(self.folder, self.position, 1 << 20)
            if not data:
                return
            if self.at is None:
                match = re.search(FATAL, data)
                if match:
                    self.at = time.time()
                    self.offset = self.position + data.rfind(b"\n", 0, match.start()) + 1
            # An incomplete last line is scanned again with the next bytes.
            complete = data.rfind(b"\n") + 1
            step = complete or (len(data) if len(data) > 65536 else 0)
            self.position += step
            if not step:
                return

    def message(self, work: str) -> str:
        """Return the error as one line."""
        return describe_error(read_log(self.folder, self.offset, 1 << 18), work)

"""The first error in a log, as one line: what ended the program, and where in the user's code."""

from __future__ import annotations

import contextlib
import os
import re
import time

from .system.log import read_log

TRACEBACK = b"Traceback (most recent call last)"

# What ends a JAX program without a traceback, or is the reason behind the traceback that follows.
FATAL = re.compile(
    rb"Traceback \(most recent call last\)|^Fatal Python error|^F\d{4} \d\d:|open\(/dev/vfio"
    rb"|Couldn.t open iommu group|Failed to initialize TPU system|TPU initialization failed"
    rb"|No accelerator found|libtpu\.so already in use",
    re.MULTILINE,
)

FRAME = re.compile(r'^\s+File "(.+?)", line (\d+)')

CHAINED = ("During handling of the above", "The above exception was the direct cause")

NOT_THE_USERS = re.compile(r"site-packages|dist-packages|/lib/python3|^<")


def described(text: str, work: str) -> str:
    """`train.py:214  ValueError: …` from the first traceback in the text and what it led to."""
    lines = text.splitlines()
    head = TRACEBACK.decode()
    start = next((at for at, line in enumerate(lines) if head in line), None)
    if start is None:
        return ""
    group = "Exception Group " in lines[start]
    prefix = "" if group else lines[start][: lines[start].index(head)]

    def plain(line: str) -> str:
        if group:
            return re.sub(r"^\s*[|+] ?", "", line)
        return line[len(prefix) :] if line.startswith(prefix) else line

    frames: list[tuple[str, str]] = []
    at = start + 1
    while at < len(lines):
        line = plain(lines[at])
        at += 1
        frame = FRAME.match(line)
        if frame:
            frames.append((frame.group(1), frame.group(2)))
        elif line.startswith(head):
            frames = []
        elif not line.strip() or line[0] in " \t" or line.startswith(CHAINED):
            continue
        else:
            ahead = [plain(later) for later in lines[at : at + 60]]
            chain = next((n for n, later in enumerate(ahead) if later.startswith(CHAINED)), None)
            if chain is None or any(later.startswith(head) for later in ahead[:chain]):
                return (place(frames, work) + line.strip())[:500]
            at += chain
    return place(frames, work) + "error" if frames else ""


def place(frames: list[tuple[str, str]], work: str) -> str:
    """The innermost frame in the user's own code."""
    if not frames:
        return ""
    theirs = [frame for frame in frames if not NOT_THE_USERS.search(frame[0])]
    path, line = (theirs or frames)[-1]
    inside = path.startswith(work + os.sep)
    return f"{os.path.relpath(path, work) if inside else os.path.basename(path)}:{line}  "


class FirstError:
    """Looks through the log as it grows, for the moment the program began to fail."""

    def __init__(self, folder: str, offset: int) -> None:
        """Start where the program's own output starts."""
        self.folder = folder
        self.position = offset
        self.at: float | None = None
        self.offset = offset

    def look(self) -> None:
        """Take in what was written since the last look."""
        if self.at is not None:
            # A program that reported progress after a traceback had caught the exception.
            with contextlib.suppress(OSError):
                beat = os.stat(os.path.join(self.folder, "heartbeat.json")).st_mtime
                if beat > self.at + 0.5:
                    self.at = None
        for _ in range(16):
            data = read_log(self.folder, self.position, 1 << 20)
            if self.at is None:
                found = FATAL.search(data)
                if found:
                    self.at = time.time()
                    self.offset = self.position + data.rfind(b"\n", 0, found.start()) + 1
            # A phrase cut in two by the end of what there is now is whole the next time.
            line = data.rfind(b"\n") + 1
            step = line or (len(data) if len(data) > 65536 else 0)
            self.position += step
            if not step:
                return

    def text(self, work: str) -> str:
        """What it says, in one line."""
        data = read_log(self.folder, self.offset, 1 << 18)
        first = data.split(b"\n", 1)[0]
        if TRACEBACK in first:
            return described(data.decode("utf-8", "replace"), work)
        return first.decode("utf-8", "replace").strip()[:500]

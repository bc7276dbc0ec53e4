"""What a program prints when its host is bad: messages of the driver and of libtpu. Pure."""

import re

BAD_HOST_TEXTS = (
    "Couldn't open iommu group",
    "open(/dev/vfio",
    "Failed to initialize TPU system",
    "TPU initialization failed",
    "No accelerator found",
)
_BAD_HOST = re.compile("|".join(map(re.escape, BAD_HOST_TEXTS)), re.IGNORECASE)
_STALE_HOLDER = re.compile(
    r"libtpu\.so already in use|libtpu_lockfile|TPU is already in use by process", re.IGNORECASE
)
_TRACEBACK = "Traceback (most recent call last)"
_BACKEND = re.compile(r"Unable to initialize backend 'tpu'", re.IGNORECASE)
_LAST_OF_A_LOG = 200_000


def blames_host(exit_code: int | None, text: str) -> bool:
    """Whether a program ended because its host is bad, by what it last printed.

    A phrase in the log of a program that exited 0, or still runs, means nothing. A phrase before a
    traceback about something else means nothing either: the program went on after it. A stale
    process that holds the chips is not a bad host; the agent ends it.
    """
    if exit_code is None or exit_code == 0:
        return False
    text = text[-_LAST_OF_A_LOG:]
    start = text.find(_TRACEBACK)
    if start >= 0 and not _BACKEND.search(text, start):
        text = text[start:]
    return not _STALE_HOLDER.search(text) and bool(_BAD_HOST.search(text))

"""How large the tests are, so that a round takes about a second on any kind of chip."""

import os
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """The sizes of one round."""

    side: int
    """Of the square matrices; even."""
    chain: int
    """bf16 products one after the other; even."""
    inner: int
    """The inner dimension of the int8 product."""
    memory: int
    """Bytes of each chip that are filled."""
    block: int
    """Bytes filled by one program."""
    words: int
    """32-bit words that a chip sends to the next."""
    numbers: int = 2**16
    """How many of the 65,536 numbers that bf16 has go through each function."""
    repeats: int = 2
    """Runs with the same numbers: of one or two chips only repetition shows which is wrong."""


def sizes_for(devices: list[Any]) -> Sizes:
    """Those for the devices of this host, by platform and free memory."""
    platform = devices[0].platform
    memory = min(_free_memory(device, len(devices)) for device in devices)
    if platform == "cpu":
        return Sizes(side=128, chain=4, inner=256, memory=memory, block=MIB, words=2**12, repeats=3)
    # Products large enough to reach the peak: a GPU needs more than a TPU's systolic array.
    side = 8192 if platform == "gpu" else 4096
    return Sizes(
        side=side,
        chain=2**18 // side // 2,
        inner=2**15,
        memory=memory,
        block=1024 * MIB,
        words=2**24,
    )


def _free_memory(device: Any, devices: int) -> int:
    """Bytes that a memory test may fill on one device."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        free = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
        # The rest is for the test's own programs, and for whoever else has arrays here.
        return max(int(0.92 * free) - 512 * MIB, 64 * MIB)
    if device.platform != "cpu":
        return 1024 * MIB
    # Emulated chips share the memory of a machine that has other things to do.
    return max(min(available_memory() // (8 * devices), 2 * MIB), MIB)


def available_memory() -> int:
    """Bytes of the host's memory that are free or can be freed; 0 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0

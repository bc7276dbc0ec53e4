"""Claims in memory, for tests in one process and for the simulation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drumline.train.checkpoints.fence import Fence, Writer, claim_folder


@dataclass
class MemoryRecords:
    """The claims of one folder."""

    stored: dict[int, dict[str, Any]] = field(default_factory=dict)

    def numbers(self) -> list[int]:
        return list(self.stored)

    def read(self, number: int) -> dict[str, Any] | None:
        return self.stored.get(number)

    def create(self, number: int, record: dict[str, Any]) -> bool:
        return self.stored.setdefault(number, record) is record

    def remove(self, number: int) -> None:
        self.stored.pop(number, None)


def fence_of(
    writer: Writer | None = None,
    records: MemoryRecords | None = None,
    is_complete: Callable[[str], bool] = lambda _: False,
) -> Fence:
    """Claim a folder whose claims are in memory."""
    return claim_folder(
        "run", records or MemoryRecords(), writer or Writer("only"), is_complete=is_complete
    )

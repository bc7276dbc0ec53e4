"""The physical machines as folders, with their faults.

    machines/local-a-v4-4-0/   DRUMLINE_MACHINE in the environment of all processes on its host
      physical_host              the machine's name, as in the metadata of a TPU VM
      fault.json                 the fault of a chip, which programs on the host simulate
      began                      created by the first program that reaches the fault's first step

The fleet assigns machines to nodes. Folders and faults last as long as the emulator's process, like
all of its state.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from drumline.cloud.emulator.host_messages import NO_FAULTS, ChipFault, MachineFaults
from drumline.files import write_atomically


class MachineFolders:
    """The folders of all machines that were used or broken so far."""

    def __init__(self, home: Path) -> None:
        """`home` is the home folder of the emulator."""
        self._root = home / "machines"
        self._broken: dict[str, MachineFaults] = {}

    @property
    def broken(self) -> Mapping[str, MachineFaults]:
        """The machines with faults."""
        return self._broken

    def remove_all(self) -> None:
        """Remove all folders, including those of a previous emulator."""
        shutil.rmtree(self._root, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """Return the folder of a machine, and create it if necessary."""
        folder = self._root / name
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not (folder / "physical_host").exists():
            write_atomically(folder / "physical_host", name)
        return folder

    def faults(self, name: str) -> MachineFaults:
        """Return the current faults of a machine."""
        return self._broken.get(name, NO_FAULTS)

    def set_faults(self, name: str, faults: MachineFaults) -> None:
        """Replace the faults of a machine."""
        if faults.chip != self.faults(name).chip:
            _write_fault(self.folder(name), faults.chip)
        if faults == NO_FAULTS:
            self._broken.pop(name, None)
        else:
            self._broken[name] = faults


def _write_fault(folder: Path, fault: ChipFault | None) -> None:
    # In this order, so that no running program marks the new fault as begun.
    (folder / "fault.json").unlink(missing_ok=True)
    (folder / "began").unlink(missing_ok=True)
    if fault is not None:
        write_atomically(folder / "fault.json", json.dumps(asdict(fault)))

"""The physical machines as folders, with what is broken in each.

    machines/local-a-v4-4-0/   DRUMLINE_MACHINE of everything that runs on a host there
      physical_host              the machine's name, as the metadata of a TPU VM tells it
      fault.json                 what a chip does wrong; programs on the host read it
      began                      made by the first program that reached the fault's first step

Which node is on which machine is the model's to decide. Folders and faults last as long as the
emulator's process, as all of its state does.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from drumline.cloud.emulator.hosts.terms import SOUND, ChipFault, MachineFaults


class MachineFolders:
    """The machines that were used or broken so far."""

    def __init__(self, home: Path) -> None:
        """Touch nothing yet; `home` is the emulator's."""
        self._all = home / "machines"
        self._broken: dict[str, MachineFaults] = {}

    @property
    def broken(self) -> Mapping[str, MachineFaults]:
        """The machines with faults."""
        return self._broken

    def clear_away(self) -> None:
        """Remove all folders, also those of an earlier emulator."""
        shutil.rmtree(self._all, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """The machine's folder, which exists from then on."""
        folder = self._all / name
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not (folder / "physical_host").exists():
            _write(folder / "physical_host", name)
        return folder

    def faults(self, name: str) -> MachineFaults:
        """What is broken there now."""
        return self._broken.get(name, SOUND)

    def set_faults(self, name: str, faults: MachineFaults) -> None:
        """From now on the machine has these faults and no others."""
        if faults.chip != self.faults(name).chip:
            _tell_programs(self.folder(name), faults.chip)
        if faults == SOUND:
            self._broken.pop(name, None)
        else:
            self._broken[name] = faults


def _tell_programs(folder: Path, fault: ChipFault | None) -> None:
    # In this order, lest a program that runs says of the new fault that it began.
    (folder / "fault.json").unlink(missing_ok=True)
    (folder / "began").unlink(missing_ok=True)
    if fault is not None:
        _write(folder / "fault.json", json.dumps(asdict(fault)))


def _write(path: Path, text: str) -> None:
    """Write the file so that nobody ever reads a part of it."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)

"""The stand-in for /dev/vfio: a file for each chip that the host has."""

import os
import stat
from pathlib import Path

from drumline.cloud.emulator.hosts.terms import HostSpec, MachineFaults


def device(spec: HostSpec, chip: int) -> Path:
    """The device file of a chip."""
    return spec.home / "dev" / "vfio" / str(chip)


def lay(spec: HostSpec, faults: MachineFaults) -> None:
    """Make the device files such as a machine with these faults has."""
    device(spec, 0).parent.mkdir(parents=True, exist_ok=True)
    for chip in range(spec.chips):
        if chip in faults.missing:
            device(spec, chip).unlink(missing_ok=True)
        else:
            _put(device(spec, chip), opens=not (faults.vfio and chip == 0))


def present(spec: HostSpec) -> int:
    """The number of chips that programs find."""
    return sum(os.path.lexists(device(spec, chip)) for chip in range(spec.chips))


def _put(path: Path, *, opens: bool) -> None:
    if os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode) == opens:
        return
    # Renamed into place: whoever counts the chips meanwhile finds this one.
    draft = path.parents[1] / "draft"
    draft.unlink(missing_ok=True)
    if opens:
        draft.touch()
    else:
        try:
            # A socket cannot be opened, not even by root, who ignores file modes.
            os.mknod(draft, stat.S_IFSOCK | 0o600)
        except OSError:
            draft.symlink_to(path.name)
    draft.replace(path)

"""Files that are replaced as a whole, and folders of any depth that are deleted."""

import os
import shutil
import subprocess
import threading
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Delete a folder as far as possible. Programs may have nested theirs more than Python can."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file: a reader sees the old or the new content, never a part of it.

    `mode` has the permissions of the new file, from which the umask is subtracted.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

"""Folders that programs have nested deeply can be deleted."""

import os
from pathlib import Path

from drumline.files import remove_tree


def test_a_folder_deeper_than_python_can_recurse_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "host"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    remove_tree(top)
    remove_tree(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []

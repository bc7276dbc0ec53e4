import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli.docs import pages

Run = Callable[..., int]
Printed = pytest.CaptureFixture[str]

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_lists_every_page_with_its_title(drumline: Run, capsys: Printed) -> None:
    assert drumline("docs") == 0
    *lines, hint = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in DOCS.glob("*.md"))
    assert "emulator      The emulated cloud" in lines
    assert hint == "next: drumline docs jobs"


@pytest.mark.parametrize("page", ["jobs", "jobs.md", "jobs.md#uninstall"])
def test_docs_prints_a_page_as_it_is(drumline: Run, capsys: Printed, page: str) -> None:
    assert drumline("docs", page) == 0
    assert capsys.readouterr().out == (DOCS / "jobs.md").read_text(encoding="utf-8")


def test_an_unknown_page_is_answered_with_the_names(drumline: Run, capsys: Printed) -> None:
    assert drumline("docs", "job") == 2
    captured = capsys.readouterr()
    [sentence] = captured.err.splitlines()
    assert sentence.startswith("docs: there is no page 'job'; the pages are architecture, ")
    assert all(name in sentence for name in pages())
    assert not captured.out


def test_docs_as_json(drumline: Run, capsys: Printed) -> None:
    assert drumline("docs", "--json") == 0
    assert {"name": "jobs", "title": "Jobs"} in json.loads(capsys.readouterr().out)
    assert drumline("docs", "jobs", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("# Jobs\n")


def test_a_terminal_gets_the_pager(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {tmp_path}/page\n")
    pager.chmod(0o755)
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "drumline", "docs", "jobs"]
    environment = {**os.environ, "PAGER": str(pager)}
    try:
        subprocess.run(command, check=True, stdin=its_end, stdout=its_end, env=environment)
    finally:
        os.close(its_end)
        os.close(terminal)
    assert (tmp_path / "page").read_text(encoding="utf-8").startswith("# Jobs\n")

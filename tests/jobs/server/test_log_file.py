"""The log of the server has a bounded size."""

import logging
import subprocess
import sys
from pathlib import Path

from drumline.jobs.server.log_file import MAX_REPEATS, REPEAT_SECONDS, RepeatLimit

WRITES = """
import logging, os, pathlib, sys
from drumline.jobs.server import log_file
log_file.MAX_BYTES = 20_000
log_file.configure(pathlib.Path(sys.argv[1]))
for n in range(5000):
    logging.getLogger("x").error(f"line {n} " + "x" * 50)
os.write(2, b"from a library\\n")
"""


def test_the_log_is_renamed_when_it_is_full(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab") as file:
        command = [sys.executable, "-c", WRITES, str(log)]
        subprocess.run(command, stderr=file, stdout=file, check=True)
    assert log.stat().st_size < 21_000
    assert (tmp_path / "server.log.1").stat().st_size < 21_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server.log", "server.log.1"]
    assert "line 4999 " in log.read_text() + (tmp_path / "server.log.1").read_text()
    assert log.read_text().endswith("from a library\n")


def test_a_line_that_repeats_is_counted_instead() -> None:
    now = 0.0
    limit = RepeatLimit(lambda: now)

    def line(text: str, *values: object) -> logging.LogRecord:
        return logging.LogRecord("x", logging.ERROR, "x.py", 1, text, values, None)

    shown = [limit.filter(line("no answer from %s", n)) for n in range(1000)]
    assert sum(shown) == MAX_REPEATS
    assert limit.filter(line("something else"))
    now = REPEAT_SECONDS
    record = line("no answer from %s", "a")
    assert limit.filter(record)
    assert record.getMessage() == "no answer from a (990 more such lines were left out)"

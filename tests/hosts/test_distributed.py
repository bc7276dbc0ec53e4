"""Two processes on CPU that join like two hosts."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from drumline.distributed import describe_error
from tests.compiling import quick_flags
from tests.ports import free_port

pytest.importorskip("jax")


def start(folder: Path, code: str, host: int, hosts: int, port: int) -> "subprocess.Popen[str]":
    home = folder / str(host)
    home.mkdir()
    (home / "train.py").write_text(textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=home,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_flags(2),
            "DRUMLINE_HOST": str(host),
            "DRUMLINE_HOSTS": str(hosts),
            "DRUMLINE_COORDINATOR": f"127.0.0.1:{port}",
            "DRUMLINE_HEARTBEAT": str(home / "heartbeat.json"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


TRAIN = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
import drumline.distributed
from drumline.heartbeat import heartbeat

def load(step):
    if step == 3 and jax.process_index() == 1:
        raise ValueError("batch 250 does not divide by 8 devices")

drumline.distributed.initialize()
assert jax.device_count() == 4
for step in range(1000):
    load(step)
    total = multihost_utils.process_allgather(jnp.float32(step)).sum()
    assert total == 2 * step
    heartbeat(step=step, total=total)
"""


def test_an_exception_on_one_host_ends_both_in_seconds_and_is_reported(tmp_path: Path) -> None:
    port = free_port()
    both = [start(tmp_path, TRAIN, host, 2, port) for host in (0, 1)]
    try:
        output = both[1].communicate(timeout=240)[0]
        assert both[1].returncode == 1, output
        failed = time.monotonic()
        both[0].communicate(timeout=120)
        assert both[0].returncode != 0
        # Otherwise it would wait in the exit barrier for 300 s.
        assert time.monotonic() - failed < 90
    finally:
        for one in both:
            one.kill()
            one.communicate()
    reported = json.loads((tmp_path / "1" / "error.json").read_text())
    assert reported["error"] == ("train.py:10  ValueError: batch 250 does not divide by 8 devices")
    assert "ValueError: batch 250" in output
    other = tmp_path / "0" / "error.json"
    assert not other.exists() or json.loads(other.read_text())["at"] > reported["at"]
    assert json.loads((tmp_path / "1" / "heartbeat.json").read_text())["step"] == 2


def test_a_single_host_reports_its_error(tmp_path: Path) -> None:
    code = """
    import atexit, sys
    import drumline.distributed
    atexit.register(print, "cleaned up")
    drumline.distributed.initialize()
    assert "jax" not in sys.modules
    raise KeyError("x")
    """
    one = start(tmp_path, code, 0, 1, 1)
    output = one.communicate(timeout=120)[0]
    assert one.returncode == 1
    assert "cleaned up" in output
    reported = json.loads((tmp_path / "0" / "error.json").read_text())
    assert reported["error"] == "train.py:7  KeyError: 'x'"


def test_the_error_names_the_users_line_not_the_librarys() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        message = describe_error(error)
    assert "test_distributed.py:" in message
    assert "JSONDecodeError: Expecting property name" in message

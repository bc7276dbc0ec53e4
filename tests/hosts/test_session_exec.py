"""User commands on a host of a session."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drumline.errors import HostError
from tests.hosts.on_hosts import on_hosts, running

from .stand_in import Slice, program, run_command, until


def test_exec_runs_in_the_working_copy_and_ends_in_time(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            code, stdout, stderr = await run_command(session, 0, "pwd; echo oh no >&2; exit 3")
            assert code == 3
            assert stdout.strip().endswith(b".drumline/work/000012/empty")
            assert stderr == b"oh no\n"
            killed, *_ = await run_command(session, 0, "echo $$ > mine; sleep 60", timeout=0.3)
            assert killed == 124
            died, *_ = await run_command(session, 0, "kill -9 $$")
            assert died == 128 + 9

    on_hosts(tmp_path, 1, story)


def test_exec_passes_every_byte_in_and_out(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        every = random.Random(3).randbytes(3 << 20)

        async def typed() -> AsyncIterator[bytes]:
            for at in range(0, len(every), 50_000):
                yield every[at : at + 50_000]

        async with running(slice_, "sleep 60") as session:
            code, stdout, stderr = await run_command(session, 0, "tee /dev/stderr", stdin=typed())
            assert (code, stdout == every, stderr == every) == (0, True, True)

    on_hosts(tmp_path, 1, story)


def test_exec_streams_its_output_and_ends_with_its_caller(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            heard = asyncio.Event()
            pieces = []

            async def output(stream: str, data: bytes) -> None:
                pieces.append((stream, data))
                heard.set()

            # One command that continues in the background, and one that ignores SIGTERM.
            command = "sleep 61.5 & trap '' TERM; echo up; while :; do sleep 0.2; done"
            executing = asyncio.create_task(session.run(0, command, output))
            await asyncio.wait_for(heard.wait(), 20)
            assert pieces == [("stdout", b"up\n")]
            assert slice_.hosts[0].runs("sleep 61.5")
            executing.cancel()
            await asyncio.gather(executing, return_exceptions=True)
            async with asyncio.timeout(20):
                while slice_.hosts[0].runs("sleep 61.5") or slice_.hosts[0].runs("trap '' TERM"):
                    await asyncio.sleep(0.05)

    on_hosts(tmp_path, 1, story)


def test_exec_says_why_the_exit_code_is_unknown(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            executing = asyncio.create_task(run_command(session, 0, "echo up > up; sleep 60"))
            await until(lambda: list(slice_.hosts[0].home.rglob("up")), "the command runs")
            slice_.hosts[0].cut()
            with pytest.raises(HostError, match="connection lost"):
                await executing
        with pytest.raises(HostError, match="no answer"):
            await run_command(slice_.session(program()), 0, "true")

    on_hosts(tmp_path, 1, story)


def test_exec_waits_for_a_slow_reader(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            started, going_on = asyncio.Event(), asyncio.Event()
            total = 0

            async def output(stream: str, data: bytes) -> None:
                nonlocal total
                del stream
                started.set()
                await going_on.wait()
                total += len(data)

            many = 16 << 20
            command = f"head -c {many} /dev/zero; echo all written > written"
            executing = asyncio.create_task(session.run(0, command, output))
            await asyncio.wait_for(started.wait(), 20)
            # The buffers are smaller than the input, so the command blocks on its pipe.
            await run_command(session, 0, "sleep 0.5")
            assert not list(slice_.hosts[0].home.rglob("written"))
            going_on.set()
            assert await executing == 0
            assert total == many

    on_hosts(tmp_path, 1, story)

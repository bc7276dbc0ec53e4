"""All hosts of a slice: SSH servers in this process, with the real agent behind them."""

import json
import os
import re
from pathlib import Path

import pytest

from drumline.hosts.code import pack
from drumline.hosts.contact import REFUSED
from drumline.hosts.log_segments import MIN_LIMIT, segments
from drumline.hosts.session import HostPhase, HostReport, Step
from tests.hosts.on_hosts import on_hosts, reach, running, work

from .stand_in import Slice, program, until


def test_two_hosts_get_the_code_run_the_set_up_and_start_together(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.sh").write_text("echo host $DRUMLINE_HOST of $DRUMLINE_HOSTS\n")
    archive = pack(code, tmp_path / "archives")

    async def story(slice_: Slice) -> None:
        what = program(
            run="bash train.sh\necho $DRUMLINE_COORDINATOR",
            archive=archive.path,
            archive_sha=archive.sha256,
            steps=(Step("hello", "test -e train.sh; echo set up"),),
        )
        session = slice_.session(what)
        session.start()
        reports = await reach(session, HostPhase.EXITED)
        assert [report.exit_code for report in reports] == [0, 0]
        logs = [slice_.log(host).decode().splitlines() for host in (0, 1)]
        assert [lines[1] for lines in logs] == ["set up", "set up"]
        assert [lines[3] for lines in logs] == ["host 0 of 2", "host 1 of 2"]
        assert logs[0][4] == logs[1][4]
        assert re.fullmatch(r"127\.0\.0\.1:\d+", logs[0][4])
        assert reports[0].tail[-1] == logs[0][4]
        await session.close()

        # The next attempt on the same hosts repeats neither transfer nor set-up.
        second = slice_.session(
            program(**{**vars(what), "attempt": 2}), logs=slice_.folder / "logs-2"
        )
        for host in slice_.hosts:
            host.commands.clear()
        second.start()
        await reach(second, HostPhase.EXITED)
        assert not [line for host in slice_.hosts for line in host.commands if "receive" in line]
        log = (slice_.folder / "logs-2" / "host-0.log").read_text()
        assert log.startswith("host 0 of 2\n")

    on_hosts(tmp_path, 2, story)


def test_only_files_that_a_host_does_not_have_are_sent(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "data.bin").write_bytes(os.urandom(3_000_000))

    async def story(slice_: Slice) -> None:
        received = []
        for attempt in (1, 2):
            (code / "train.py").write_text(f"print('attempt {attempt}')\n")
            archive = pack(code, tmp_path / "archives")
            what = program(
                job_id=f"00000{attempt}",
                run="wc -c < data.bin; cat train.py",
                archive=archive.path,
                archive_sha=archive.sha256,
                large_files=archive.large_files,
            )
            for host in slice_.hosts:
                host.commands.clear()
            session = slice_.session(what, logs=slice_.folder / f"logs-{attempt}")
            session.start()
            await reach(session, HostPhase.EXITED)
            log = (slice_.folder / f"logs-{attempt}" / "host-1.log").read_text()
            assert log == f"3000000\nprint('attempt {attempt}')\n"
            assert {report.bytes_to_send for report in session.reports()} == {0}
            commands = [line for host in slice_.hosts for line in host.commands]
            received.append(sum(" receive " in line for line in commands))
            await session.close()
        assert received == [4, 2], "the archive and the large file, then only the archive"

    on_hosts(tmp_path, 2, story)


def test_no_program_starts_before_all_hosts_are_ready(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        slow = 'if [[ $HOME == *home-1 ]]; then while [ ! -e "$HOME/go" ]; do sleep 0.05; done; fi'
        session = slice_.session(program(run="echo ran", steps=(Step("slow", slow),)))
        session.start()
        await until(
            lambda: [r.phase for r in session.reports()] == [HostPhase.READY, HostPhase.PREPARING],
            "host 0 waits for host 1",
        )
        assert session.reports()[1].detail == "setup: slow"
        assert b"ran" not in slice_.log(0)
        (slice_.hosts[1].home / "go").touch()
        await reach(session, HostPhase.EXITED)

    on_hosts(tmp_path, 2, story)


def test_the_log_is_complete_after_lost_connections(tmp_path: Path) -> None:
    lines = 4000

    async def story(slice_: Slice) -> None:
        run = (
            f"echo x >> starts; for i in $(seq {lines}); do echo line $i; "
            "if (( i % 100 == 0 )); then sleep 0.05; fi; done"
        )
        async with running(slice_, run) as session:
            for _ in range(4):
                size = len(slice_.log(0))
                await until(
                    lambda size=size: (  # type: ignore[misc]
                        len(slice_.log(0)) > size + 2000
                        or session.reports()[0].phase is HostPhase.EXITED
                    ),
                    "the log grows",
                )
                slice_.hosts[0].cut()
            reports = await reach(session, HostPhase.EXITED)
            assert reports[0].exit_code == 0
        expected = "".join(f"line {i}\n" for i in range(1, lines + 1))
        assert slice_.log(0).decode() == expected
        assert (work(slice_.hosts[0].home) / "starts").read_text() == "x\n"

    on_hosts(tmp_path, 1, story)


def test_a_log_over_its_limit_keeps_its_head_and_its_end(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = slice_.session(program(run="seq 100000; echo the end"), log_limit=MIN_LIMIT)
        session.start()
        await reach(session, HostPhase.EXITED)
        head, *tail = segments(slice_.folder / "logs" / "host-0.log")
        assert head.path.read_bytes().startswith(b"1\n2\n3\n")
        assert tail[-1].path.read_bytes().endswith(b"100000\nthe end\n")
        assert sum(part.size for part in (head, *tail)) <= MIN_LIMIT
        await session.close()
        # The next session requests only the missing part, not the part it dropped.
        again = slice_.session(program(run="seq 100000; echo the end"), log_limit=MIN_LIMIT)
        again.start()
        await reach(again, HostPhase.EXITED)
        assert segments(slice_.folder / "logs" / "host-0.log")[-1] == tail[-1]

    on_hosts(tmp_path, 1, story)


def test_a_new_server_attaches_to_a_running_program(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        run = 'echo x >> starts; echo one; while [ ! -e "$HOME/go" ]; do sleep 0.05; done; exit 3'
        step = Step("once", "echo x >> steps")
        async with running(slice_, run, steps=(step,)) as first:
            await first.close()
        session = slice_.session(program(run=run, steps=(step,)))
        session.start()
        before = await reach(session, HostPhase.RUNNING)
        assert all(report.started_at is not None for report in before)
        for host in slice_.hosts:
            (host.home / "go").touch()
        reports = await reach(session, HostPhase.EXITED)
        assert [report.exit_code for report in reports] == [3, 3]
        for index, host in enumerate(slice_.hosts):
            assert (work(host.home) / "starts").read_text() == "x\n"
            assert (work(host.home) / "steps").read_text() == "x\n"
            assert slice_.log(index).decode().count("one\n") == 1

    on_hosts(tmp_path, 2, story)


def test_after_a_crash_between_two_starts_the_coordinator_is_the_same(
    tmp_path: Path,
) -> None:
    async def story(slice_: Slice) -> None:
        run = "echo at $DRUMLINE_COORDINATOR; sleep 60"
        async with running(slice_, run) as first:
            await first.close()
        # Simulate a server that died before it started host 1.
        slice_.hosts[1].reboot()
        started = slice_.folder / "logs" / "started"
        begun = json.loads(started.read_text())
        started.write_text(json.dumps({**begun, "hosts": [0]}))
        session = slice_.session(program(run=run))
        session.start()
        await reach(session, HostPhase.RUNNING)
        await until(lambda: slice_.log(1).count(b"at ") == 1, "host 1 runs")
        await until(lambda: slice_.log(0).count(b"at ") == 1, "host 0 ran all the time")
        assert slice_.log(1) == slice_.log(0) == f"at {begun['coordinator']}\n".encode()

    on_hosts(tmp_path, 2, story)


def test_a_restarted_host_is_missing_its_program(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "echo up; sleep 60") as session:
            await until(lambda: slice_.log(1) == b"up\n", "host 1 runs")
            slice_.hosts[1].reboot()
            await until(
                lambda: session.reports()[1].phase is HostPhase.MISSING, "host 1 is missing"
            )
            assert session.reports()[0].phase is HostPhase.RUNNING
            await session.close()
        again = slice_.session(program(run="echo up; sleep 60"))
        again.start()
        await until(lambda: again.reports()[1].phase is HostPhase.MISSING, "still so")
        assert slice_.log(1) == b"up\n"

    on_hosts(tmp_path, 2, story)


def test_an_unreachable_host_keeps_its_last_phase(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            slice_.hosts[1].drop_data()
            await until(lambda: session.reports()[1].detail != "", "the silence is noticed")
            heard = [report.heard_at or 0 for report in session.reports()]
            await until(
                lambda: (session.reports()[0].heard_at or 0) > heard[0] + 1, "host 0 is heard of"
            )
            now = session.reports()
            assert now[1].heard_at == heard[1]
            assert now[1].phase is HostPhase.RUNNING
            slice_.hosts[1].pass_data()
            await until(lambda: (session.reports()[1].heard_at or 0) > heard[1], "it is back")
            await until(lambda: session.reports()[1].detail == "", "and all is well")

    on_hosts(tmp_path, 2, story)


def test_the_failing_host_does_not_stop_its_siblings(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        run = "if [ $DRUMLINE_HOST = 1 ]; then echo broken; exit 5; fi; sleep 60"
        session = slice_.session(program(run=run))
        session.start()
        await until(lambda: session.reports()[1].exit_code == 5, "host 1 failed")
        assert session.reports()[1].error == "broken"
        await until(lambda: session.reports()[0].phase is HostPhase.RUNNING, "host 0 runs on")
        await session.stop(grace=2)
        reports = session.reports()
        assert [report.phase for report in reports] == [HostPhase.EXITED, HostPhase.EXITED]
        assert reports[1].exit_code == 5
        assert reports[0].exit_code in {-15, 128 + 15}  # the death of the shell, or of its child

    on_hosts(tmp_path, 2, story)


def test_a_stop_names_the_hosts_that_did_not_confirm_it(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60") as session:
            slice_.hosts[1].drop_data()
            assert await session.stop(grace=0.5) == (1,)
            assert session.reports()[0].phase is HostPhase.EXITED
            slice_.hosts[1].pass_data()
            await until(lambda: session.reports()[1].detail == "", "it is back")
            assert await session.stop(grace=2) == ()
            assert session.reports()[1].phase is HostPhase.EXITED

    on_hosts(tmp_path, 2, story)


def test_a_stop_during_set_up_ends_it_and_starts_no_program(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        step = Step("slow", "echo setting up; sleep 60")
        session = slice_.session(
            program(run="echo ran", steps=(step,), secrets={"TOKEN": "hunter2"})
        )
        session.start()
        await until(lambda: b"setting up" in slice_.log(0), "set-up is under way")
        await session.stop(grace=1)
        assert {report.phase for report in session.reports()} == {HostPhase.EXITED}
        assert not list(slice_.hosts[0].home.rglob("secrets.json"))
        await session.close()
        again = slice_.session(program(run="echo ran", steps=(step,)))
        again.start()
        await reach(again, HostPhase.EXITED)
        assert b"ran" not in slice_.log(0)

    on_hosts(tmp_path, 1, story)


def test_a_new_server_stops_the_attempt_with_its_grace_period(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        run = (
            "trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05 || :; done"
        )
        async with running(slice_, run) as first:
            await until(lambda: b"up" in slice_.log(0), "the program is up")
            await first.close()
        session = slice_.session(program(run=run))
        await session.stop(grace=10)
        await until(lambda: b"saved" in slice_.log(0), "it saved")
        assert session.reports()[0].phase is HostPhase.EXITED

    on_hosts(tmp_path, 1, story)


def test_a_failed_set_up_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        step = Step("pip", "echo no matching distribution >&2; exit 4")
        session = slice_.session(program(run="echo ran", steps=(step,)))
        session.start()
        report = (await reach(session, HostPhase.FAILED))[0]
        assert (report.detail, report.exit_code) == ("setup: pip", 4)
        expected = "set-up of pip  exit 4  exit code 4: no matching distribution"
        assert report.error == expected
        slice_.hosts[0].cut()
        await until(lambda: session.reports()[0].detail != "connection lost", "it is back")
        assert session.reports()[0].phase is HostPhase.FAILED

    on_hosts(tmp_path, 1, story)


def test_a_chip_that_stays_busy_is_reported(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        devices = tmp_path / "dev"
        (devices / "vfio" / "0").mkdir(parents=True)
        slice_.hosts[0].environment["DRUMLINE_DEV"] = str(devices)
        session = slice_.session(program(run="echo ran"))
        session.start()
        report = (await reach(session, HostPhase.FAILED))[0]
        assert report.error.startswith("open(/dev/vfio/0): ")

    on_hosts(tmp_path, 1, story)


def test_hosts_without_a_rank_are_prepared_and_count_as_exited(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        session = slice_.session(
            program(run="echo $DRUMLINE_HOST of $DRUMLINE_HOSTS; exit 2", hosts=(1,))
        )
        session.start()
        reports = await reach(session, HostPhase.EXITED)
        assert [report.exit_code for report in reports] == [0, 2]
        assert slice_.log(1) == b"0 of 1\n"
        assert slice_.log(0) == b""
        assert reports[0].detail == "runs nothing"

    on_hosts(tmp_path, 2, story)


def test_shell_syntax_in_names_and_values_is_not_executed(tmp_path: Path) -> None:
    nasty = 'a\'b"c $(touch "$HOME/ran") `touch $HOME/ran` ; touch $HOME/ran\n../../x'

    async def story(slice_: Slice) -> None:
        session = slice_.session(
            program(
                job_id=nasty,
                name=nasty,
                accelerator=nasty,
                environment={"VALUE": nasty},
                secrets={"TOKEN": nasty},
                steps=(Step(nasty, "true"),),
                run='printf %s "$VALUE" > value; printf %s "$TOKEN" > token',
            )
        )
        session.start()
        reports = await reach(session, HostPhase.EXITED)
        assert reports[0].exit_code == 0
        home = slice_.hosts[0].home
        assert not list(tmp_path.rglob("ran"))
        assert {path.read_text() for path in home.rglob("value")} == {nasty}
        assert {path.read_text() for path in home.rglob("token")} == {nasty}
        assert os.listdir(home) == [".drumline"]

    on_hosts(tmp_path, 1, story)


def test_a_changed_host_key_is_rejected(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        async with running(slice_, "sleep 60", job_id="000001") as session:
            file = session.known_hosts_file
            host, key = file.read_text().split(" ", 1)
            assert host == f"[127.0.0.1]:{slice_.hosts[0].port}"
            assert key.split()[0] == "ssh-ed25519"
            await session.close()
        file.write_text(f"{host} ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOtherOtherOther\n")
        slice_.hosts[0].commands.clear()
        again = slice_.session(program(run="sleep 60", job_id="000001"))
        again.start()
        await until(lambda: "host key" in again.reports()[0].detail, "it is refused")
        assert again.reports()[0].phase is HostPhase.CONNECTING
        assert slice_.hosts[0].commands == []

    on_hosts(tmp_path, 1, story)


def test_the_session_waits_for_a_host_that_boots(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        await slice_.hosts[0].stop()
        session = slice_.session(program(run="exit 0"))
        session.start()
        await until(lambda: session.reports()[0].detail == "connection refused", "it says so")
        assert session.reports()[0] == HostReport(
            0,
            HostPhase.CONNECTING,
            None,
            "connection refused",
            rank=0,
            contact=REFUSED,
        )
        await slice_.hosts[0].start()
        await reach(session, HostPhase.EXITED)

    on_hosts(tmp_path, 1, story)


def test_a_heartbeat_is_reported_and_sets_the_changed_event(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        run = 'sleep 0.3; echo \'{"step": 4, "loss": NaN}\' > $DRUMLINE_HEARTBEAT; sleep 60'
        async with running(slice_, run) as session:
            await until(lambda: session.reports()[0].heartbeat is not None, "a pulse")
            assert session.reports()[0].heartbeat == {"step": 4, "loss": "NaN"}
            assert session.changed.is_set()

    on_hosts(tmp_path, 1, story)


def test_a_host_outside_the_slice_is_an_error(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        with pytest.raises(ValueError, match="hosts: 3 is not on a slice of 1 hosts"):
            slice_.session(program(hosts=(3,)))

    on_hosts(tmp_path, 1, story)


def test_a_new_server_knows_the_identity_of_a_host_with_a_running_program(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        machine = tmp_path / "machine"
        machine.mkdir()
        (machine / "physical_host").write_bytes(b" m-\x1b\xff1\n" + b"x" * 2_000_000)
        slice_.hosts[0].environment["DRUMLINE_MACHINE"] = str(machine)
        async with running(slice_, "sleep 60") as first:
            name = first.reports()[0].identity["physical_host"]
            assert name.startswith("m-�1x")
            assert len(name) <= 200
            await first.close()
        again = slice_.session(program(run="sleep 60"))
        assert again.reports()[0].identity == {"physical_host": name}

    on_hosts(tmp_path, 1, story)

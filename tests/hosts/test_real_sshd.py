"""The whole path over OpenSSH.

Two hosts run in separate namespaces, with their own network, processes, user and home. Needs root,
sshd and ip; otherwise the tests are skipped.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from drumline.hosts.session import Address, HostPhase, SliceSession, Step

from .stand_in import FAST, program, run_command, until

NEEDED = ("/usr/sbin/sshd", "/usr/bin/python3")
IP = shutil.which("ip") or "ip"
SUBNET = f"10.231.{os.getpid() % 250}"

HOST = """\
set -e
mount -t tmpfs tmpfs /home
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /home/etc /home/drumline
printf 'root:x:0:0::/root:/bin/bash\\nsshd:x:74:74::/run/sshd:/bin/false\\n' > /home/etc/passwd
echo 'drumline:x:4242:4242::/home/drumline:/bin/bash' >> /home/etc/passwd
printf 'root:*:1::::::\\nsshd:*:1::::::\\ndrumline:*:1::::::\\n' > /home/etc/shadow
cp "$FOLDER/authorized" "$FOLDER/key-$N" /home/etc
chmod 644 /home/etc/passwd /home/etc/authorized
chmod 600 /home/etc/key-$N
chown 4242:4242 /home/drumline
mount --bind /home/etc/passwd /etc/passwd
mount --bind /home/etc/shadow /etc/shadow
hostname "host-$N"
exec /usr/sbin/sshd -D -e -f /dev/null -h /home/etc/key-$N -o PidFile=none -o UsePAM=no \\
  -o PasswordAuthentication=no -o AuthorizedKeysFile=/home/etc/authorized -o StrictModes=no
"""


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)


class Machines:
    """Two hosts connected by a bridge."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"dl{os.getpid() % 100000}"
        self.servers: list[subprocess.Popen[bytes]] = []
        self.addresses: list[Address] = []
        self.key = folder / "id"

    def start(self) -> None:
        login = asyncssh.generate_private_key("ssh-ed25519")
        login.write_private_key(str(self.key))
        (self.folder / "authorized").write_bytes(login.export_public_key())
        ip("link", "add", self.mark, "type", "bridge")
        ip("addr", "add", f"{SUBNET}.254/24", "dev", self.mark)
        ip("link", "set", self.mark, "up")
        for n in range(2):
            self._start_host(n)

    def _start_host(self, n: int) -> None:
        name, address = f"{self.mark}-{n}", f"{SUBNET}.{n + 1}"
        own = asyncssh.generate_private_key("ssh-ed25519")
        own.write_private_key(str(self.folder / f"key-{n}"))
        ip("netns", "add", name)
        ip("link", "add", f"{self.mark}p{n}", "type", "veth", "peer", "eth0", "netns", name)
        ip("link", "set", f"{self.mark}p{n}", "master", self.mark, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        words = ["netns", "exec", name, "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        with (self.folder / f"sshd-{n}").open("wb") as output:
            server = subprocess.Popen(
                [IP, *words, "--mount-proc", "--uts", "bash", "-c", HOST],
                env={**os.environ, "FOLDER": str(self.folder), "N": str(n)},
                stderr=output,
            )
        self.servers.append(server)
        public = own.export_public_key().decode().strip()
        self.addresses.append(Address(address, 22, address, public if n == 0 else None))

    def plug(self, n: int, state: str) -> None:
        ip("link", "set", f"{self.mark}p{n}", state)

    def stop(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()
        for words in (
            ["netns", "del", f"{self.mark}-0"],
            ["netns", "del", f"{self.mark}-1"],
            ["link", "del", self.mark],
        ):
            subprocess.run([IP, *words], check=False, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    missing = [name for name in NEEDED if not Path(name).exists()]
    missing += [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install openssh-server iproute2)")
    made = Machines(tmp_path)
    try:
        try:
            made.start()
        except subprocess.CalledProcessError as trouble:
            pytest.skip(f"cannot make network namespaces here: {trouble.stderr.decode().strip()}")
        yield made
    finally:
        made.stop()


RUN = r"""
echo "I am $(hostname), host $DRUMLINE_HOST of $DRUMLINE_HOSTS, uid $(id -u)"
python3 - <<'END'
import os, socket, time
host, port = os.environ["DRUMLINE_COORDINATOR"].split(":")
if os.environ["DRUMLINE_HOST"] == "0":
    with socket.create_server((host, int(port))) as server:
        one, _ = server.accept()
        print("host 1 says", one.recv(100).decode(), flush=True)
else:
    while True:
        try:
            with socket.create_connection((host, int(port)), 1) as one:
                one.send(b"hello")
            break
        except OSError:
            time.sleep(0.05)
END
for i in $(seq 25); do echo line $i; sleep 0.1; done
exit 3
"""


def test_two_hosts_over_openssh_through_an_outage(machines: Machines, tmp_path: Path) -> None:
    logs = tmp_path / "logs"

    async def story() -> None:
        session = SliceSession(
            program(run=RUN, steps=(Step("once", "echo set up >> steps"),)),
            machines.addresses,
            key=machines.key,
            known_hosts=tmp_path / "known",
            logs=logs,
            timing=replace(FAST, connect_timeout=1),
        )
        session.start()
        try:
            await until(
                lambda: {r.phase for r in session.reports()} == {HostPhase.RUNNING},
                f"all run: {[path.read_text() for path in tmp_path.glob('sshd-*')]}",
            )
            log = logs / "host-1.log"
            await until(
                lambda: log.exists() and "line 3\n" in log.read_text(), "host 1 is on its way"
            )
            machines.plug(1, "down")
            await until(lambda: session.reports()[1].detail != "", "the outage is noticed")
            assert session.reports()[1].phase is HostPhase.RUNNING
            machines.plug(1, "up")
            await until(
                lambda: {r.phase for r in session.reports()} == {HostPhase.EXITED}, "all end"
            )
            assert [report.exit_code for report in session.reports()] == [3, 3]
            _, written, _ = await run_command(session, 1, "cat steps; pgrep -c sleep")
            assert written == b"set up\n0\n"
            # A command ends with its caller, even if it ignores SIGTERM.
            stubborn = "trap '' TERM; while :; do sleep 0.1; done"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await run_command(session, 1, stubborn)
            async with asyncio.timeout(30):
                while b"trap" in (await run_command(session, 1, "pgrep -af [t]rap"))[1]:
                    await asyncio.sleep(0.2)
        finally:
            await session.close()

    asyncio.run(story())
    for n in range(2):
        lines = (logs / f"host-{n}.log").read_text().splitlines()[2:]
        assert lines[0] == f"I am host-{n}, host {n} of 2, uid 4242"
        assert lines[-25:] == [f"line {i}" for i in range(1, 26)]
    assert "host 1 says hello" in (logs / "host-0.log").read_text()

"""A server without free descriptors waits, and answers when some are free again."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

SERVER = """
import asyncio, logging, resource, socket, sys
import uvicorn
from drumline.cloud import serving

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

async def main():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    web = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    asyncio.get_running_loop().call_later(60, lambda: setattr(web, "should_exit", True))
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    await serving.serve(web, listener)

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""


def connect(path: Path) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert time.monotonic() < deadline, "the server never listened"
            time.sleep(0.02)
        else:
            return connection


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = b""
    while data := connection.recv(4096):
        answer += data
    return answer


def test_a_server_without_free_descriptors_does_not_spin(tmp_path: Path) -> None:
    path, log = tmp_path / "sock", tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stderr=file)
    try:
        with connect(path) as first:
            assert b"hello" in ask(first)
        callers = [connect(path) for _ in range(100)]
        deadline = time.monotonic() + 30
        while b"calls wait" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        used = cpu_seconds(server.pid)
        time.sleep(2)  # the time over which its work is measured
        assert cpu_seconds(server.pid) - used < 0.5
        assert log.stat().st_size < 5000
        waiting = callers.pop()
        for caller in callers:
            caller.close()
        with waiting:
            assert b"hello" in ask(waiting)
    finally:
        server.kill()
        server.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

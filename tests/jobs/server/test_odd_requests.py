"""Whatever a client sends, on any route: an answer with a sentence, and the server continues."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from drumline.jobs.server.api import JobsApi
from tests.jobs.fakes import ZONE, ServerHarness, run_scenario

IDS = (
    "abc", "-1", "1e3", "%00", "0x1", "999999999999999999999999", "%F0%9F%98%80", "%ED%A0%80",
    "000001", "1", "0", "+1", "%20", "..", "1%0a", "\u0661".encode().hex(), "%D9%A1",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 10**400, "", "x", "\0", "\ud800", "x" * 10_000, [], [1], [[]],
    {}, {"a": 1}, {"": None}, float("nan"), float("inf"),
)  # fmt: skip
VERBS = ("cancel", "delete", "clean", "resume", "nonsense", "exec", "%00")
BODIES = (
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe\xff", b"[" * 100_000, b'{"a":' * 100_000,
    b"\0", b"{}" * 2, b'{"a":1,"a":2}', b"NaN",
)  # fmt: skip
SPEC = {"accelerator": "v4-16", "zones": [ZONE], "run": "x", "workdir": None}
FIELDS = {
    "/jobs": ("spec", "secrets", "user", "origin"),
    "/plan": ("spec", "origin"),
    "/jobs/000001/resume": ("spec", "secrets", "origin"),
    "/jobs/000001/exec": ("command", "host"),
    "/strays/adopt": ("names", "user"),
    "/strays/release": ("names", "user"),
    "/hosts/exclude": ("identity", "why", "seconds"),
    "/hosts/forgive": ("identity",),
}
QUERIES = {
    "/jobs": ("all", "status", "name", "user", "limit", "before"),
    "/jobs/000001/events": ("after", "wait"),
    "/jobs/000001/logs": ("attempt", "host", "tail", "follow", "since", "merge", "times", "all",
                          "raw", "lines", "from", "hosts", "grep", "head", "until"),
    "/hosts": ("identity",),
}  # fmt: skip
TEXTS = (
    "", "x", "-1", "nan", "inf", "1e400", "9" * 5000, "%00", "%ED%A0%80", "%F0%9F%98%80", "[", "*",
    "1", "all", "0", "1.5", "%27", "99999999999999999999",
)  # fmt: skip


def requests() -> list[tuple[str, str, bytes]]:
    made: list[tuple[str, str, bytes]] = []
    for job_id in IDS:
        views = ("", "/history", "/events", "/logs", "/hosts")
        made += [("GET", f"/jobs/{job_id}{view}", b"") for view in views]
        made += [("POST", f"/jobs/{job_id}/{verb}", b"{}") for verb in VERBS]
    routes = [*FIELDS, *(f"/jobs/abc/{verb}" for verb in VERBS), "/jobs/000001/cancel"]
    made += [("POST", route, body) for route in routes for body in BODIES]
    for route, fields in FIELDS.items():
        usual = {"spec": SPEC, "command": "true", "identity": "x"}
        for field, value in itertools.product(fields, VALUES):
            body = {k: v for k, v in usual.items() if k in fields} | {field: value}
            made.append(("POST", route, json.dumps(body).encode()))
    for key, value in itertools.product(
        ("run", "workdir", "zones", "accelerator", "name", "secrets", "environment", "checkpoint",
         "python", "mounts", "include", "retry", "hosts", "keep", "stop_grace", "stuck_after"),
        VALUES,
    ):  # fmt: skip
        for route in ("/jobs", "/plan"):
            made.append(("POST", route, json.dumps({"spec": SPEC | {key: value}}).encode()))
    for key, value in itertools.product(("from", "file", "overrides", "checkpoint"), VALUES):
        made.append(("POST", "/jobs", json.dumps({"spec": SPEC, "origin": {key: value}}).encode()))
    for route, keys in QUERIES.items():
        made += [("GET", f"{route}?{k}={text}", b"") for k in keys for text in TEXTS]
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"):
        made += [(method, route, b"") for route in ("/jobs", "/jobs/000001", "/status", "/x")]
    return made


@pytest.mark.parametrize("part", range(4))
def test_no_request_is_an_internal_error(tmp_path: Path, part: int) -> None:
    async def scenario(harness: ServerHarness) -> None:
        await harness.create()
        app: Any = JobsApi(harness.service, lambda: None, lambda: None).application()
        transport = httpx.ASGITransport(app)
        failures = []
        async with httpx.AsyncClient(transport=transport, base_url="http://drumline") as client:
            for method, path, body in requests()[part::4]:
                try:
                    async with asyncio.timeout(60):  # a log that is followed has no end
                        answer = await client.request(method, path, content=body)
                    # An invalid job file gets a line for each mistake.
                    lines = b"spec" in body or not answer.content.startswith(b'{"error"')
                    if answer.status_code < 500 and (lines or "\n" not in answer.json()["error"]):
                        continue
                    failures.append(f"{method} {path:.80} {body[:150]!r}: {answer.status_code}")
                except TimeoutError:
                    continue
                except Exception as error:
                    failures.append(f"{method} {path:.80} {body[:150]!r}: {error!r:.200}")
            assert (await client.get("/jobs")).status_code == 200
        assert not failures, "\n".join(failures)

    run_scenario(tmp_path, scenario)

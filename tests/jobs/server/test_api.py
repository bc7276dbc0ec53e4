"""Invalid requests of any client get an error message."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from drumline.jobs.server.api import JobsApi
from tests.jobs.fakes import ServerHarness, run_scenario


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "/jobs", b"[]", "not a JSON object"),
        ("POST", "/jobs", b"{", "not JSON"),
        ("POST", "/jobs", b"\xff\xfe\xff", "not JSON"),
        ("POST", "/jobs", b"{}", "no 'spec'"),
        ("POST", "/plan", b"{}", "no 'spec'"),
        ("POST", "/jobs/000001/cancel", b"[" * 100_000, "not JSON"),
        ("POST", "/strays/adopt", b'"x"', "not a JSON object"),
        ("POST", "/jobs/000001/exec", b"{}", "no 'command'"),
        ("GET", "/jobs/000001/events?after=x", b"", "after: 'x'"),
        ("GET", "/jobs/000001/events?wait=nan", b"", "wait: 'nan'"),
        ("GET", "/jobs/000001/events?after=-1", b"", "after: '-1'"),
    ],
)
def test_an_invalid_request_gets_a_message(
    tmp_path: Path, method: str, path: str, body: bytes, message: str
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        await harness.create()
        app: Any = JobsApi(harness.service, lambda: None, lambda: None).application()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://drumline") as client:
            answer = await client.request(method, path, content=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]

    run_scenario(tmp_path, scenario)

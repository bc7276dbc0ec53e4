"""Requests that make no sense are answered with a sentence, whoever wrote the client."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from drumline.jobs.server.api import JobsApi
from tests.jobs.fakes import ServerHarness, run_scenario


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
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
def test_a_request_that_makes_no_sense_gets_a_sentence(
    tmp_path: Path, method: str, path: str, body: bytes, said: str
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        await harness.create()
        app: Any = JobsApi(harness.service, lambda: None, lambda: None).application()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://drumline") as client:
            answer = await client.request(method, path, content=body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]

    run_scenario(tmp_path, scenario)

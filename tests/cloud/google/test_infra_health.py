"""Google Cloud Monitoring's reports on hosts, and the ones Drumline uses."""

import asyncio
from typing import Any

import httpx
import pytest

from drumline.cloud.google.infra_health import METRIC, InfraHealth
from drumline.cloud.protocol import CloudError


def series(instance: str, status: str = "UNHEALTHY", value: Any = True, **labels: str) -> Any:
    return {
        "metric": {"type": METRIC, "labels": {"health_status": status, **labels}},
        "resource": {"type": "gce_instance", "labels": {"instance_id": instance}},
        "points": [{"value": {"boolValue": value}}],
    }


def asked(*pages: Any) -> tuple[dict[str, str], list[httpx.Request]]:
    """Return the parsed reports of these responses, and the requests."""
    left, seen = list(pages), []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        page = left.pop(0)
        return page if isinstance(page, httpx.Response) else httpx.Response(200, json=page)

    async def read() -> dict[str, str]:
        health = InfraHealth("lab", transport=httpx.MockTransport(answer))
        try:
            return await health.unhealthy()
        finally:
            await health.close()

    return asyncio.run(read()), seen


def test_unhealthy_instances_are_read_from_all_pages() -> None:
    conditions, calls = asked(
        {
            "timeSeries": [series("1", unhealthy_category="BAD_TPU_CHIP"), series("2", "HEALTHY")],
            "nextPageToken": "more",
        },
        {"timeSeries": [series("3")]},
    )
    assert conditions == {"1": "BAD_TPU_CHIP", "3": "UNHEALTHY"}
    assert calls[0].url.path == "/v3/projects/lab/timeSeries"
    assert METRIC in calls[0].url.params["filter"]
    assert calls[1].url.params["pageToken"] == "more"


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"timeSeries": "nonsense"},
        {"timeSeries": [None, {}, {"metric": 3}]},
        {"timeSeries": [series("1", value=False)]},
    ],
)
def test_invalid_series_are_ignored(page: Any) -> None:
    assert asked(page)[0] == {}


def test_a_rejected_call_is_a_cloud_error() -> None:
    with pytest.raises(CloudError):
        asked(httpx.Response(403, json={"error": {"code": 403, "message": "no"}}))

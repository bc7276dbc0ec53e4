"""Reads which hosts are unhealthy according to Google's Monitoring.

The metric `compute.googleapis.com/instance/tpu/infra_health` has a series per instance and status.
An unhealthy instance has a category such as BAD_TPU_CHIP. Google does not document that spot slices
have this metric, so Drumline works without it.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from drumline.cloud.google.credentials import Credentials
from drumline.cloud.google.rest import CallLimits, Dependencies, RestCall, RestClient

MONITORING = "https://monitoring.googleapis.com"
METRIC = "compute.googleapis.com/instance/tpu/infra_health"
RECENT = timedelta(minutes=5)
"""The age of the oldest point that counts."""
_MAX_PAGES = 20


class InfraHealth:
    """A reader of the metric."""

    def __init__(
        self,
        project: str,
        *,
        base_url: str = MONITORING,
        credentials: Credentials | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        """Open no connection yet."""
        self._url = f"{base_url}/v3/projects/{project}/timeSeries"
        self._dependencies = dependencies or Dependencies()
        self._client = RestClient(
            base_url, credentials, CallLimits(), self._dependencies, transport
        )

    async def unhealthy(self) -> dict[str, str]:
        """Return the category of each unhealthy instance by its id. Raises CloudError."""
        now = self._dependencies.now().astimezone(UTC)
        query = {
            "filter": f'metric.type = "{METRIC}" AND metric.labels.health_status = "UNHEALTHY"',
            "interval.startTime": _format_time(now - RECENT),
            "interval.endTime": _format_time(now),
        }
        categories: dict[str, str] = {}
        deadline = self._client.deadline()
        for _ in range(_MAX_PAGES):
            response = await self._client.send(RestCall("GET", self._url, query), deadline)
            for series in _sequence(response, "timeSeries"):
                instance, category = _parse_series(series)
                if instance:
                    categories[instance] = category
            token = response.get("nextPageToken")
            if not isinstance(token, str) or not token:
                break
            query["pageToken"] = token
        return categories

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _parse_series(series: Any) -> tuple[str, str]:
    """Return the instance and the category of a series, or empty texts if it is not unhealthy."""
    labels = _mapping(_mapping(series, "metric"), "labels")
    instance = _mapping(_mapping(series, "resource"), "labels").get("instance_id")
    if labels.get("health_status") != "UNHEALTHY" or not isinstance(instance, str):
        return "", ""
    if not any(_is_true(_mapping(point, "value")) for point in _sequence(series, "points")):
        return "", ""
    return instance, str(labels.get("unhealthy_category") or "UNHEALTHY")[:100]


def _is_true(value: dict[str, Any]) -> bool:
    """Return True if the value of a point is true."""
    raw = next(iter(value.values()), None)
    return str(raw).lower() not in {"0", "0.0", "false", "none"}


def _mapping(value: Any, key: str) -> dict[str, Any]:
    item = value.get(key) if isinstance(value, dict) else None
    return item if isinstance(item, dict) else {}


def _sequence(value: Any, key: str) -> list[Any]:
    item = value.get(key) if isinstance(value, dict) else None
    return item if isinstance(item, list) else []


def _format_time(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")

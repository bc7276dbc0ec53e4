"""Which hosts Google itself calls unhealthy, by its Monitoring metric.

`compute.googleapis.com/instance/tpu/infra_health` has a series for each instance and status; an
unhealthy one names a category such as BAD_TPU_CHIP. That spot slices have it is not documented, so
nothing relies on it.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from drumline.cloud.google.credentials import Credentials
from drumline.cloud.google.rest import CallLimits, Rest, RestCall, World

MONITORING = "https://monitoring.googleapis.com"
METRIC = "compute.googleapis.com/instance/tpu/infra_health"
RECENT = timedelta(minutes=5)
"""A series whose last point is older says nothing about now."""
_MOST_PAGES = 20


class InfraHealth:
    """A reader of the metric."""

    def __init__(
        self,
        project: str,
        *,
        base_url: str = MONITORING,
        credentials: Credentials | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        world: World | None = None,
    ) -> None:
        """Nothing is opened yet."""
        self._url = f"{base_url}/v3/projects/{project}/timeSeries"
        self._world = world or World()
        self._rest = Rest(base_url, credentials, CallLimits(), self._world, transport)

    async def unhealthy(self) -> dict[str, str]:
        """The category of each instance that is unhealthy now, by its id. Raises CloudError."""
        now = self._world.now().astimezone(UTC)
        query = {
            "filter": f'metric.type = "{METRIC}" AND metric.labels.health_status = "UNHEALTHY"',
            "interval.startTime": _written(now - RECENT),
            "interval.endTime": _written(now),
        }
        found: dict[str, str] = {}
        deadline = self._rest.deadline()
        for _ in range(_MOST_PAGES):
            answer = await self._rest.send(RestCall("GET", self._url, query), deadline)
            for series in _list(answer, "timeSeries"):
                instance, category = _read(series)
                if instance:
                    found[instance] = category
            token = answer.get("nextPageToken")
            if not isinstance(token, str) or not token:
                break
            query["pageToken"] = token
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()


def _read(series: Any) -> tuple[str, str]:
    """The instance and the category of a series; an empty instance where it says neither."""
    labels = _map(_map(series, "metric"), "labels")
    instance = _map(_map(series, "resource"), "labels").get("instance_id")
    if labels.get("health_status") != "UNHEALTHY" or not isinstance(instance, str):
        return "", ""
    if not any(_holds(_map(point, "value")) for point in _list(series, "points")):
        return "", ""
    return instance, str(labels.get("unhealthy_category") or "UNHEALTHY")[:100]


def _holds(value: dict[str, Any]) -> bool:
    """Whether a point says that the status is the instance's."""
    said = next(iter(value.values()), None)
    return str(said).lower() not in {"0", "0.0", "false", "none"}


def _map(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _written(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

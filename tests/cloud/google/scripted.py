"""A scripted Cloud TPU API with prepared responses, and a clock that tests control."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import pytest

from drumline.cloud.google.placements import ListedNode, ListedRequest
from drumline.cloud.google.rest import Dependencies
from drumline.cloud.google.tpu_api import TpuApi
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.hosts.protocol import SshLogin

Answer = httpx.Response | Exception


Result = TypeVar("Result")


ZONE = "us-central2-b"


PARENT = f"projects/p/locations/{ZONE}"


NOW = datetime(2026, 1, 1, tzinfo=UTC)


WANTED = PlacementRequest(
    name="dl-ann-000012-1",
    zone=ZONE,
    accelerator="v4-16",
    tier="spot",
    labels={"drumline-owner": "ann", "drumline-job": "000012"},
    login=SshLogin("drumline", "ssh-ed25519 AAAA drumline"),
)


@dataclass
class Script:
    """A cloud that returns prepared responses in turn and repeats the last one."""

    answers: list[Answer]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        # Each request needs a response of its own.
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)


@dataclass
class Time:
    """A clock that advances only while sleeping, and the sleeps it recorded."""

    at: float = 100.0
    slept: list[float] = field(default_factory=list)
    chance: float = 1.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    def dependencies(self) -> Dependencies:
        return Dependencies(
            sleep=self.sleep, random=lambda: self.chance, clock=lambda: self.at, now=lambda: NOW
        )


class Login:
    quota_project: str | None = None

    def __init__(self, *tokens: str | CloudError) -> None:
        self.tokens = list(tokens)
        self.refused: list[str | None] = []

    async def token(self, refused: str | None = None) -> str:
        self.refused.append(refused)
        one = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        if isinstance(one, CloudError):
            raise one
        return one


def run(
    script: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]],
    story: Callable[[TpuApi], Coroutine[Any, Any, Result]],
    time: Time | None = None,
    **options: Any,
) -> Result:
    async def whole() -> Result:
        api = TpuApi(
            "p",
            transport=httpx.MockTransport(script),  # type: ignore[arg-type]
            dependencies=(time or Time()).dependencies(),
            **options,
        )
        try:
            return await story(api)
        finally:
            await api.close()

    return asyncio.run(whole())


def ok(**body: Any) -> httpx.Response:
    return httpx.Response(200, json=body)


def refused(
    http: int,
    status: str | None,
    message: str,
    details: Iterable[object] = (),
    **headers: str,
) -> httpx.Response:
    error: dict[str, Any] = {"code": http, "message": message, "details": list(details)}
    if status:
        error["status"] = status
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return httpx.Response(http, json={"error": error}, headers=named)


def fails(
    script: Script,
    story: Callable[[TpuApi], Coroutine[Any, Any, Any]],
    time: Time | None = None,
    **options: Any,
) -> CloudError:
    with pytest.raises(CloudError) as caught:
        run(script, story, time, **options)
    return caught.value


def list_nodes(api: TpuApi) -> Coroutine[Any, Any, list[ListedNode]]:
    return api.nodes(ZONE)


def list_requests(api: TpuApi) -> Coroutine[Any, Any, list[ListedRequest]]:
    return api.requests(ZONE)


def ask(api: TpuApi) -> Coroutine[Any, Any, str]:
    return api.ask(WANTED)


def release(api: TpuApi) -> Coroutine[Any, Any, None]:
    return api.release(ZONE, "s")


NO_REQUEST = refused(404, "NOT_FOUND", "no such request")


def release_node(api: TpuApi) -> Coroutine[Any, Any, None]:
    return api.release(ZONE, "s", ["s"])

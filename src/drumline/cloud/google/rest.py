"""A REST call with retries, until it succeeds, fails for good, or its time is up.

All our calls are idempotent (names are made before the call), so all of them are retried alike.
The result is JSON or a CloudError, never anything else.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from drumline.cloud.google.answers import ErrorAnswer, Rpc, read_refusal
from drumline.cloud.google.credentials import LOGIN, Credentials
from drumline.cloud.protocol import CloudError

_log = logging.getLogger(__name__)

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class CallLimits:
    """Timeouts in seconds after which the caller gets an error and goes on with its loop."""

    connect: float = 5.0
    read: float = 20.0
    """The timeout of a read: listing a zone with hundreds of nodes takes seconds."""
    write: float = 10.0
    pool: float = 10.0
    attempts: int = 4
    first_delay: float = 0.5
    longest_delay: float = 8.0
    total: float = 45.0
    """The timeout of a call with all its retries and waits, and all pages of a listing."""

    def delay(self, failed: int, chance: float) -> float:
        """Exponential backoff with full jitter, so that callers do not retry at the same time.

        `failed` counts the attempts made, `chance` lies in [0, 1).
        """
        ceiling = min(self.longest_delay, self.first_delay * 2.0 ** min(failed - 1, 30))
        return chance * ceiling


@dataclass(frozen=True)
class World:
    """The outside dependencies of a call; tests inject their own."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass(frozen=True)
class RestCall:
    """What to send."""

    method: str
    url: str
    query: Mapping[str, str] | None = None
    body: Mapping[str, Any] | None = None


class _Unanswered(Exception):
    """An attempt got no answer, or one that cannot be read."""


class Rest:
    """A pool of connections, the token that goes with each call, and the retries."""

    def __init__(
        self,
        base_url: str,
        credentials: Credentials | None,
        patience: CallLimits,
        world: World,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is opened yet. `credentials` None sends no token."""
        self._credentials = credentials
        self._patience = patience
        self._world = world
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(
                connect=patience.connect,
                read=patience.read,
                write=patience.write,
                pool=patience.pool,
            ),
            transport=transport,
            # A proxy from the environment must not be used for the emulator.
            trust_env=urlsplit(base_url).hostname not in _LOOPBACK,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def deadline(self) -> "Deadline":
        """The deadline of one operation, shared by all calls that it consists of."""
        return Deadline(self._world.clock() + self._patience.total, self._patience.total)

    async def send(self, call: RestCall, deadline: "Deadline") -> dict[str, Any]:
        """The JSON object of the answer. Raises CloudError after the retries that made sense."""
        failed = 0
        refused: str | None = None
        while True:
            wait: float | None = None
            try:
                answer, token = await self._once(call, refused, deadline)
                if not isinstance(answer, ErrorAnswer):
                    return answer
                if answer.http == 401:
                    if token is None or refused is not None:
                        raise CloudError(
                            f"Google refused our credentials: {answer.text}; {LOGIN}",
                            Rpc.UNAUTHENTICATED.value,
                        )
                    refused = token
                    continue
                error = CloudError(answer.text, answer.code)
                if not answer.may_pass:
                    raise error
                wait = answer.wait
            except _Unanswered as reason:
                error = CloudError(f"no answer from {urlsplit(call.url).netloc}: {reason}")
            failed += 1
            if failed >= self._patience.attempts:
                raise error
            # The wait that the cloud asked for is the minimum; jitter on top keeps callers apart.
            pause = self._patience.delay(failed, self._world.random()) + (wait or 0.0)
            if self._world.clock() + pause >= deadline.at:
                raise error
            _log.info("%s %s: %s; again in %.1f s", call.method, call.url, error, pause)
            await self._world.sleep(pause)

    async def _once(
        self, call: RestCall, refused: str | None, deadline: "Deadline"
    ) -> tuple[dict[str, Any] | ErrorAnswer, str | None]:
        """One attempt: the response, and the token it was made with."""
        left = deadline.at - self._world.clock()
        try:
            # httpx bounds each read, not the whole response: a trickle would never end.
            async with asyncio.timeout(max(left, 0.0)):
                token, headers = await self._headers(refused)
                response = await self._client.request(
                    call.method, call.url, params=call.query, json=call.body, headers=headers
                )
        except TimeoutError:
            raise _Unanswered(f"nothing after {deadline.total:g} s") from None
        except httpx.TransportError as error:
            raise _Unanswered(f"{type(error).__name__} {error}".strip()) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # A body that cannot be decoded, such as one that is not the gzip it claims.
            raise _Unanswered(f"{type(error).__name__} {error}".strip()) from error
        if not response.is_success:
            refusal = read_refusal(
                response.status_code, response.content, response.headers, self._world.now()
            )
            return refusal, token
        return _json_object(call, response.content), token

    async def _headers(self, refused: str | None) -> tuple[str | None, dict[str, str]]:
        if self._credentials is None:
            return None, {}
        try:
            token = await self._credentials.token(refused)
        except CloudError as error:
            if error.code is None:
                raise _Unanswered(str(error)) from error
            raise
        headers = {"Authorization": f"Bearer {token}"}
        if self._credentials.quota_project:
            headers["X-Goog-User-Project"] = self._credentials.quota_project
        return token, headers


@dataclass(frozen=True)
class Deadline:
    """A point in time on the injected clock."""

    at: float
    total: float


def _json_object(call: RestCall, body: bytes) -> dict[str, Any]:
    """The answer as an object; a truncated one must never pass for an empty listing."""
    if not body.strip() and call.method != "GET":
        return {}
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        start = body[:80].decode(errors="replace")
        raise _Unanswered(f"the answer is no JSON: {start!r}") from None
    if not isinstance(answer, dict):
        raise _Unanswered("the answer is no JSON object")
    return answer

"""Sends REST calls and retries them until they succeed, fail permanently, or time out.

All calls of Drumline are idempotent, because names are chosen before the call, so all are retried
in the same way. The result is a JSON object or a CloudError.
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

from drumline.cloud.google.credentials import LOGIN, Credentials
from drumline.cloud.google.errors import Rpc
from drumline.cloud.google.responses import ErrorResponse, parse_error
from drumline.cloud.protocol import CloudError

_log = logging.getLogger(__name__)

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class CallLimits:
    """The timeouts of a call in seconds, and its retries."""

    connect: float = 5.0
    read: float = 20.0
    """Listing a zone with hundreds of nodes takes seconds."""
    write: float = 10.0
    pool: float = 10.0
    attempts: int = 4
    first_delay: float = 0.5
    longest_delay: float = 8.0
    total: float = 45.0
    """The timeout of a call with all its retries and delays, and of all pages of a listing."""

    def delay(self, failures: int, jitter: float) -> float:
        """Return the delay before the next retry: exponential backoff with full jitter.

        `failures` is the number of failed tries and `jitter` a random number in [0, 1).
        """
        longest = min(self.longest_delay, self.first_delay * 2.0 ** min(failures - 1, 30))
        return jitter * longest


@dataclass(frozen=True)
class Dependencies:
    """The clock, the randomness and the sleep of a call. Tests inject their own."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    on_answer: Callable[["RestCall", int | None, bytes], None] | None = None
    """A callback for each answer, with its HTTP code and body; without a code, for no answer."""


@dataclass(frozen=True)
class RestCall:
    """The method, URL, query and body of a call."""

    method: str
    url: str
    query: Mapping[str, str] | None = None
    body: Mapping[str, Any] | None = None


class _NoResponse(Exception):
    """A try got no response, or one that cannot be parsed."""


class RestClient:
    """Sends calls over a pool of connections, with a token and with retries."""

    def __init__(
        self,
        base_url: str,
        credentials: Credentials | None,
        limits: CallLimits,
        dependencies: Dependencies,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open no connection yet. Without `credentials`, calls have no token."""
        self._credentials = credentials
        self._limits = limits
        self._dependencies = dependencies
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(
                connect=limits.connect,
                read=limits.read,
                write=limits.write,
                pool=limits.pool,
            ),
            transport=transport,
            # The emulator must not be called through a proxy from the environment.
            trust_env=urlsplit(base_url).hostname not in _LOOPBACK,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def deadline(self) -> "Deadline":
        """Return the deadline of an operation, which all its calls share."""
        return Deadline(self._dependencies.clock() + self._limits.total, self._limits.total)

    async def send(self, call: RestCall, deadline: "Deadline") -> dict[str, Any]:
        """Return the JSON object of the response. Raises CloudError after the retries."""
        failures = 0
        rejected_token: str | None = None
        while True:
            retry_after: float | None = None
            try:
                response, token = await self._try_once(call, rejected_token, deadline)
                if not isinstance(response, ErrorResponse):
                    return response
                if response.http == 401:
                    if token is None or rejected_token is not None:
                        raise CloudError(
                            f"Google rejects the credentials: {response.text}; {LOGIN}",
                            Rpc.UNAUTHENTICATED.value,
                        )
                    rejected_token = token
                    continue
                error = CloudError(response.text, response.code)
                if not response.is_transient:
                    raise error
                retry_after = response.retry_after
            except _NoResponse as reason:
                error = CloudError(f"no answer from {urlsplit(call.url).netloc}: {reason}")
            failures += 1
            if failures >= self._limits.attempts:
                raise error
            # The delay that the cloud asks for is the minimum. Jitter on top spreads the callers.
            delay = self._limits.delay(failures, self._dependencies.random()) + (retry_after or 0.0)
            if self._dependencies.clock() + delay >= deadline.at:
                raise error
            _log.info("%s %s: %s; retrying in %.1f s", call.method, call.url, error, delay)
            await self._dependencies.sleep(delay)

    async def _try_once(
        self, call: RestCall, rejected_token: str | None, deadline: "Deadline"
    ) -> tuple[dict[str, Any] | ErrorResponse, str | None]:
        """Send the call once. Return the response and the token of the call."""
        remaining = deadline.at - self._dependencies.clock()
        try:
            # httpx limits the time of each read, not that of the whole response.
            async with asyncio.timeout(max(remaining, 0.0)):
                token, headers = await self._headers(rejected_token)
                response = await self._client.request(
                    call.method, call.url, params=call.query, json=call.body, headers=headers
                )
        except TimeoutError:
            reason = f"nothing after {deadline.total:g} s"
            self._report_answer(call, None, reason.encode())
            raise _NoResponse(reason) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # A transport error, or a body that cannot be decoded, such as invalid gzip.
            reason = f"{type(error).__name__} {error}".strip()
            self._report_answer(call, None, reason.encode())
            raise _NoResponse(reason) from error
        self._report_answer(call, response.status_code, response.content)
        if not response.is_success:
            error_response = parse_error(
                response.status_code, response.content, response.headers, self._dependencies.now()
            )
            return error_response, token
        return _json_object(call, response.content), token

    def _report_answer(self, call: RestCall, status: int | None, body: bytes) -> None:
        if self._dependencies.on_answer is not None:
            self._dependencies.on_answer(call, status, body)

    async def _headers(self, rejected_token: str | None) -> tuple[str | None, dict[str, str]]:
        if self._credentials is None:
            return None, {}
        try:
            token = await self._credentials.token(rejected_token)
        except CloudError as error:
            if error.code is None:
                raise _NoResponse(str(error)) from error
            raise
        headers = {"Authorization": f"Bearer {token}"}
        if self._credentials.quota_project:
            headers["X-Goog-User-Project"] = self._credentials.quota_project
        return token, headers


@dataclass(frozen=True)
class Deadline:
    """A time on the injected clock."""

    at: float
    total: float


def _json_object(call: RestCall, body: bytes) -> dict[str, Any]:
    """Parse a response. A truncated one is an error, never an empty listing."""
    if not body.strip() and call.method != "GET":
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        start = body[:80].decode(errors="replace")
        raise _NoResponse(f"the response is not JSON: {start!r}") from None
    if not isinstance(value, dict):
        raise _NoResponse("the response is not a JSON object")
    return value

"""Who we are to Google: a bearer token that is fresh when it is needed.

google-auth is imported when the first token is asked for: its transport costs 0.2 s, and a job on
the emulator never needs it. Everything it does blocks, so it runs in a thread.
"""

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from drumline.cloud.protocol import CloudError

if TYPE_CHECKING:
    from google.auth.credentials import Credentials as GoogleAuthCredentials

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = "run gcloud auth application-default login"
UNAUTHENTICATED = 16

# A token lives for an hour. Five minutes outlast any call and its retries.
_MARGIN = timedelta(minutes=5)

Found = tuple["GoogleAuthCredentials", str | None]


class Credentials(Protocol):
    """What `TpuApi` wants of whoever logs us in."""

    @property
    def quota_project(self) -> str | None:
        """The project that calls are counted against, where it is not the credentials' own."""

    async def token(self, refused: str | None = None) -> str:
        """A bearer token, and not the one the cloud `refused`."""


class GoogleCredentials:
    """The application-default credentials, refreshed five minutes before they expire."""

    def __init__(
        self,
        find: Callable[[], Found] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Look for nothing yet; `find` and `now` stand in for google.auth and the clock."""
        self._find = find or _default
        self._now = now
        self._held: GoogleAuthCredentials | None = None
        # The supervisor looks at many zones at once; one of the looks refreshes, the others wait.
        self._one_at_a_time = asyncio.Lock()

    @property
    def quota_project(self) -> str | None:
        """As google-auth knows it; a user's own login needs one, a service account does not."""
        project = getattr(self._held, "quota_project_id", None)
        return project if isinstance(project, str) else None

    async def token(self, refused: str | None = None) -> str:
        """The cached token while it is good, else a fresh one; CloudError 16 where there is none.

        Many calls may be refused with the same stale token: the first to come here refreshes it,
        and the others, whose token is no longer the cached one, take what it got.
        """
        async with self._one_at_a_time:
            held = self._held
            if held is None:
                found = await asyncio.to_thread(self._find)
                held = self._held = found[0]
            if held.token is None or held.token == refused or self._ends_soon(held):
                await asyncio.to_thread(_refresh, held)
            if not isinstance(held.token, str):
                raise CloudError(f"Google gave no access token: {LOGIN}", UNAUTHENTICATED)
            return held.token

    def _ends_soon(self, held: "GoogleAuthCredentials") -> bool:
        expiry: datetime | None = held.expiry
        if expiry is None:
            return False
        # google-auth keeps the expiry in UTC without saying so.
        if expiry.tzinfo is None:
            expiry = expiry.replace(tzinfo=UTC)
        return expiry - self._now() <= _MARGIN


def find_project(find: Callable[[], Found] | None = None) -> str | None:
    """The project to use when nobody named one: the environment's, the login's, or None.

    Blocks, and on a machine without any login for seconds: google-auth tries to reach the metadata
    server that a virtual machine of Google's would have.
    """
    named = os.environ.get("GOOGLE_CLOUD_PROJECT")
    if named:
        return named
    try:
        _, project = (find or _default)()
    except CloudError:
        return None
    return project


def _default() -> Found:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        found: Found = google.auth.default(scopes=[SCOPE])
    except GoogleAuthError as error:
        # This variable goes before a login: while it is wrong, logging in would not help.
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        mend = f"GOOGLE_APPLICATION_CREDENTIALS={named} is no key file we can use; unset it, then "
        raise CloudError(
            f"no Google credentials: {mend if named else ''}{LOGIN}", UNAUTHENTICATED
        ) from error
    return found


def _refresh(held: "GoogleAuthCredentials") -> None:
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.auth.transport.requests import Request

    try:
        held.refresh(Request())  # type: ignore[no-untyped-call]
    except TransportError as error:
        # Not being reached is no verdict on the login: the code stays empty, the call is retried.
        raise CloudError(f"no answer when refreshing the Google credentials: {error}") from error
    except GoogleAuthError as error:
        if error.retryable:
            raise CloudError(f"could not refresh the Google credentials: {error}") from error
        raise CloudError(f"Google credentials have expired: {LOGIN}", UNAUTHENTICATED) from error

"""Authentication with Google: a bearer token that is fresh when it is needed.

google-auth is imported with the first token: its transport takes 0.2 s, and a job on the emulator
never needs it. All its calls block, so they run in a thread.
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

# A token is valid for an hour. Five minutes outlast any call and its retries.
_MARGIN = timedelta(minutes=5)

Found = tuple["GoogleAuthCredentials", str | None]


class Credentials(Protocol):
    """What `TpuApi` needs for its authentication."""

    @property
    def quota_project(self) -> str | None:
        """The project whose quota calls count against, if not that of the credentials."""

    async def token(self, refused: str | None = None) -> str:
        """A bearer token other than the one that the cloud `refused`."""


class GoogleCredentials:
    """The application-default credentials, refreshed five minutes before they expire."""

    def __init__(
        self,
        find: Callable[[], Found] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`find` and `now` stand in for google.auth and the clock; nothing is loaded yet."""
        self._find = find or _default
        self._now = now
        self._held: GoogleAuthCredentials | None = None
        # The supervisor polls many zones at once; one of the polls refreshes, the others wait.
        self._one_at_a_time = asyncio.Lock()

    @property
    def quota_project(self) -> str | None:
        """The quota project of the login: a user's login needs one, a service account does not."""
        project = getattr(self._held, "quota_project_id", None)
        return project if isinstance(project, str) else None

    async def token(self, refused: str | None = None) -> str:
        """The cached token while it is valid, else a fresh one; raises CloudError 16 without login.

        Many calls may be refused with the same stale token: the first of them refreshes it, and
        the others, whose token is no longer the cached one, take the fresh one.
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
        # google-auth keeps the expiry as a naive UTC time.
        if expiry.tzinfo is None:
            expiry = expiry.replace(tzinfo=UTC)
        return expiry - self._now() <= _MARGIN


def find_project(find: Callable[[], Found] | None = None) -> str | None:
    """The default project: the environment's, the login's, or None.

    Blocks, for seconds on a machine without a login: google-auth tries to reach the metadata server
    that a virtual machine at Google would have.
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
        # This variable takes precedence over a login: while it is wrong, a login does not help.
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
        # A network error says nothing about the login: without a code, the call is retried.
        raise CloudError(f"no answer when refreshing the Google credentials: {error}") from error
    except GoogleAuthError as error:
        if error.retryable:
            raise CloudError(f"could not refresh the Google credentials: {error}") from error
        raise CloudError(f"Google credentials have expired: {LOGIN}", UNAUTHENTICATED) from error

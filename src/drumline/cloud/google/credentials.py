"""Bearer tokens for Google, refreshed before they expire.

google-auth is imported with the first token: its transport takes 0.2 s to import, and a job on the
emulator never needs it. Its calls block, so they run in a thread.
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

# A token is valid for an hour. Five minutes are longer than any call with its retries.
_MARGIN = timedelta(minutes=5)

DefaultCredentials = tuple["GoogleAuthCredentials", str | None]
"""The credentials of the login, and its project."""


class Credentials(Protocol):
    """The source of tokens for `RestClient`."""

    @property
    def quota_project(self) -> str | None:
        """The project whose quota the calls use, if it is not that of the credentials."""

    async def token(self, rejected: str | None = None) -> str:
        """Return a bearer token other than the one that the cloud rejected."""


class GoogleCredentials:
    """The application-default credentials, refreshed five minutes before they expire."""

    def __init__(
        self,
        find: Callable[[], DefaultCredentials] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`find` and `now` replace google.auth and the clock in tests."""
        self._find = find or _default
        self._now = now
        self._credentials: GoogleAuthCredentials | None = None
        # The supervisor polls many zones at once. One poll refreshes the token, the others wait.
        self._lock = asyncio.Lock()

    @property
    def quota_project(self) -> str | None:
        """The quota project of the login. A user's login needs one, a service account does not."""
        project = getattr(self._credentials, "quota_project_id", None)
        return project if isinstance(project, str) else None

    async def token(self, rejected: str | None = None) -> str:
        """Return the cached token while it is valid, else a fresh one.

        Raises CloudError with code 16 without a login. Many calls may be rejected with the same
        token. The first of them refreshes it. The others get the fresh token, because theirs is no
        longer the cached one.
        """
        async with self._lock:
            credentials = self._credentials
            if credentials is None:
                credentials = (await asyncio.to_thread(self._find))[0]
                self._credentials = credentials
            if (
                credentials.token is None
                or credentials.token == rejected
                or self._expires_soon(credentials)
            ):
                try:
                    await asyncio.to_thread(_refresh, credentials)
                except CloudError as error:
                    if error.code == UNAUTHENTICATED:
                        # The next call rereads the login, which the user may have renewed.
                        self._credentials = None
                    raise
            if not isinstance(credentials.token, str):
                raise CloudError(f"Google gave no access token: {LOGIN}", UNAUTHENTICATED)
            return credentials.token

    def _expires_soon(self, credentials: "GoogleAuthCredentials") -> bool:
        expiry: datetime | None = credentials.expiry
        if expiry is None:
            return False
        # google-auth keeps the expiry as a naive UTC time.
        if expiry.tzinfo is None:
            expiry = expiry.replace(tzinfo=UTC)
        return expiry - self._now() <= _MARGIN


def find_project(find: Callable[[], DefaultCredentials] | None = None) -> str | None:
    """Return the default project of the environment or of the login, or None.

    Blocks for seconds on a machine without a login, because google-auth tries to reach the metadata
    server of a virtual machine at Google.
    """
    project_in_environment = os.environ.get("GOOGLE_CLOUD_PROJECT")
    if project_in_environment:
        return project_in_environment
    try:
        _, project = (find or _default)()
    except CloudError:
        return None
    return project


def _default() -> DefaultCredentials:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials: DefaultCredentials = google.auth.default(scopes=[SCOPE])
    except GoogleAuthError as error:
        # This variable takes precedence over a login, so a login alone does not help.
        key_file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        fix = f"GOOGLE_APPLICATION_CREDENTIALS={key_file} is not a valid key file; unset it, then "
        raise CloudError(
            f"no Google credentials: {fix if key_file else ''}{LOGIN}", UNAUTHENTICATED
        ) from error
    return credentials


def _refresh(credentials: "GoogleAuthCredentials") -> None:
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.auth.transport.requests import Request

    try:
        credentials.refresh(Request())  # type: ignore[no-untyped-call]
    except TransportError as error:
        # A network error without a code: the call is retried, and the login may be valid.
        raise CloudError(f"no answer when refreshing the Google credentials: {error}") from error
    except GoogleAuthError as error:
        if error.retryable:
            raise CloudError(f"could not refresh the Google credentials: {error}") from error
        raise CloudError(f"Google credentials have expired: {LOGIN}", UNAUTHENTICATED) from error

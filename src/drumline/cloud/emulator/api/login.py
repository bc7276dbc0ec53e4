"""The emulator's authentication: a call without its token is refused before it is read.

A port on the loopback address is open to every user of the machine, and a user who can create a
node could add their own key to it and log in as the emulator's owner.

Clients of Cloud Storage send no token to an emulator. Their calls have a path that nobody can guess
instead.
"""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.cloud.emulator.api.control import PREFIX
from drumline.cloud.model import errors

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}


class Login:
    """Wraps the whole application: the API, the controls, and paths that do not exist."""

    def __init__(self, app: ASGIApp, token: str, storage_path: str) -> None:
        """Accept calls with this token, and calls below this path."""
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._storage_path = f"{storage_path}/".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] != "http":
            return
        given = Headers(scope=scope).get("authorization", "").encode()
        path = scope["path"].encode()[: len(self._storage_path)]
        allowed = hmac.compare_digest(path, self._storage_path)
        if allowed or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            await _refusal(scope["path"], missing=not given)(scope, receive, send)


def _refusal(path: str, *, missing: bool) -> JSONResponse:
    if path.startswith(PREFIX):
        sentence = "this emulator is another user's, or was started anew: its token is required"
        return JSONResponse({"error": sentence}, 401, _CHALLENGE)
    refused = errors.login_missing() if missing else errors.login_expired()
    return JSONResponse(refused.as_json(), refused.http_status, _CHALLENGE)

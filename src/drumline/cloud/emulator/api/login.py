"""The emulator's authentication: a call without its token is rejected before it is read.

A port on the loopback address is open to every user of the machine. A user who could create a node
could add their own key to it and log in as the emulator's owner.

Clients of Cloud Storage send no token to an emulator. Their calls have a secret path instead.
"""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from drumline.cloud.emulator.api.control import PREFIX
from drumline.cloud.model import errors

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}


class Login:
    """Checks the token of every call: of the API, of the controls, and of unknown paths."""

    def __init__(self, app: ASGIApp, token: str, storage_path: str) -> None:
        """Accept calls with this token and calls below this path."""
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._storage_path = f"{storage_path}/".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or reject it."""
        if scope["type"] != "http":
            return
        authorization = Headers(scope=scope).get("authorization", "").encode()
        path = scope["path"].encode()[: len(self._storage_path)]
        allowed = hmac.compare_digest(path, self._storage_path)
        if allowed or hmac.compare_digest(authorization, self._expected):
            await self._app(scope, receive, send)
        else:
            await _rejection(scope["path"], missing=not authorization)(scope, receive, send)


def _rejection(path: str, *, missing: bool) -> JSONResponse:
    if path.startswith(PREFIX):
        message = (
            "the token of this emulator is missing or wrong; the emulator may have been restarted "
            "or belong to another user"
        )
        return JSONResponse({"error": message}, 401, _CHALLENGE)
    error = errors.login_missing() if missing else errors.login_expired()
    return JSONResponse(error.as_json(), error.http_status, _CHALLENGE)

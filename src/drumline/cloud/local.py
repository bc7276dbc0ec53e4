"""The emulator on this machine as the job manager's cloud.

It is known by its home folder, not by its address: the folder has the port and the token of the
emulator that runs now, and both change when it is restarted. They are read at every call, so a
caller finds the emulator again when it comes back.
"""

from pathlib import Path

import httpx

from drumline.cloud.emulator import launch
from drumline.cloud.google.tpu_api import TpuApi
from drumline.cloud.protocol import CloudError

# A placeholder: the address is read at each call.
_URL = "http://localhost"


def emulated_cloud(project: str, home: Path) -> TpuApi:
    """The Cloud TPU API of the emulator in that home, whether or not one runs there now."""
    return TpuApi(
        project,
        base_url=_URL,
        storage_url=_URL,
        credentials=EmulatorCredentials(home),
        ssh_port=None,
        transport=_ToEmulator(home),
    )


class EmulatorCredentials:
    """The token that the emulator left in its home folder for its owner."""

    quota_project: str | None = None

    def __init__(self, home: Path) -> None:
        """Read nothing yet."""
        self._home = home

    async def token(self, refused: str | None = None) -> str:
        """The token of the emulator that runs now; a restarted emulator has another."""
        del refused
        found = launch.find(self._home)
        if found is None:
            raise CloudError(_none_runs(self._home))
        return found.token


class _ToEmulator(httpx.AsyncHTTPTransport):
    """Sends every call to where the emulator listens now."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        found = launch.find(self._home)
        if found is None:
            raise httpx.ConnectError(_none_runs(self._home), request=request)
        there = httpx.URL(found.url)
        request.url = request.url.copy_with(host=there.host, port=there.port)
        return await super().handle_async_request(request)


def _none_runs(home: Path) -> str:
    return f"no emulator runs in {home}; drumline emulator start starts it"

"""The emulator on this machine as the job manager's cloud.

The emulator is identified by its home folder, not by its address. A file there has its port and its
token, and both change when it restarts. They are read at every call, so a caller finds a restarted
emulator.
"""

from pathlib import Path

import httpx

from drumline.cloud.emulator import launch
from drumline.cloud.google.rest import Dependencies
from drumline.cloud.google.tpu_api import TpuApi
from drumline.errors import CloudError

# A placeholder: the address is read at each call.
_URL = "http://localhost"


def emulated_cloud(project: str, home: Path, dependencies: Dependencies | None = None) -> TpuApi:
    """Return the Cloud TPU API of the emulator in a home, which need not run yet."""
    return TpuApi(
        project,
        base_url=_URL,
        storage_url=_URL,
        resource_manager_url=_URL,
        dependencies=dependencies,
        credentials=EmulatorCredentials(home),
        ssh_port=None,
        transport=_EmulatorTransport(home),
    )


class EmulatorCredentials:
    """The token that the emulator wrote into its home folder."""

    quota_project: str | None = None

    def __init__(self, home: Path) -> None:
        """`home` is the home folder of the emulator."""
        self._home = home

    async def token(self, rejected: str | None = None) -> str:
        """Return the token of the running emulator. A restarted emulator has another."""
        del rejected
        access = launch.find(self._home)
        if access is None:
            raise CloudError(launch.absence(self._home))
        return access.token


class _EmulatorTransport(httpx.AsyncHTTPTransport):
    """Sends every call to the address at which the emulator listens."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        access = launch.find(self._home)
        if access is None:
            raise httpx.ConnectError(launch.absence(self._home), request=request)
        address = httpx.URL(access.url)
        request.url = request.url.copy_with(host=address.host, port=address.port)
        return await super().handle_async_request(request)

"""The Cloud TPU API (REST, v2) as the job manager's `Cloud`: Google's, or the emulator's.

    TpuApi(project, credentials=GoogleCredentials())                              # Google
    TpuApi("local", base_url=url, storage_url=url, ssh_port=None)                 # the emulator

What is sent and received is in `messages`, how a call is made and retried in `rest`.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx

from drumline.cloud.google import messages, placements
from drumline.cloud.google.answers import Rpc
from drumline.cloud.google.credentials import Credentials
from drumline.cloud.google.faults import refusal
from drumline.cloud.google.resources import ListedNode, ListedRequest
from drumline.cloud.google.rest import CallLimits, Deadline, Rest, RestCall, World
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.observed import ListedPlacement, Refusal

GOOGLE = "https://tpu.googleapis.com"
STORAGE = "https://storage.googleapis.com"
SSH_PORT = 22

# The largest page of the API is not documented; it may return less than requested.
_PAGE = "500"
# No project has so many pages; a last page that points to another would loop forever.
_MOST_PAGES = 200
_BEING_DELETED = re.compile(
    r"(?:already|currently|is) (?:being )?delet(?:ed|ing)\b|\bbeing deleted\b"
    r"|\bstate\b[\s:='\"]*(?:is )?DELETING\b|deletion (?:is )?(?:already )?in progress",
    re.IGNORECASE,
)


class TpuApi:
    """See `protocol.Cloud` for what each call promises."""

    def __init__(
        self,
        project: str,
        *,
        base_url: str = GOOGLE,
        storage_url: str = STORAGE,
        credentials: Credentials | None = None,
        ssh_port: int | None = SSH_PORT,
        patience: CallLimits | None = None,
        world: World | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is opened yet.

        `credentials` None calls without a token. `ssh_port` None takes the port that each endpoint
        publishes: the emulator's hosts share an address. Google publishes the port of the TPU's
        own service there, so 22 is the default.
        """
        self._project = project
        self._base = base_url.rstrip("/")
        self._storage = storage_url.rstrip("/")
        self._ssh_port = ssh_port
        self._rest = Rest(
            self._base, credentials, patience or CallLimits(), world or World(), transport
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()

    async def requests(self, zone: str) -> list[ListedRequest]:
        """All queued resources of the project in a zone, all pages."""
        return messages.read_requests(await self._list(zone, "queuedResources"), zone)

    async def nodes(self, zone: str) -> list[ListedNode]:
        """All nodes of the project in a zone, all pages."""
        return messages.read_nodes(await self._list(zone, "nodes"), zone, self._ssh_port)

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """All placements of the project in a zone, by one listing of each collection."""
        return placements.listed(*await asyncio.gather(self.requests(zone), self.nodes(zone)))

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """The placement of that name, None where the cloud has none."""
        found = messages.read_requests(await self._get(zone, "queuedResources", name), zone)
        request = found[0] if found else None
        names = request.nodes if request and request.nodes else (name,)
        nodes = [entry for node in names for entry in await self._get(zone, "nodes", node)]
        listed = messages.read_nodes(nodes, zone, self._ssh_port)
        return placements.combined(request, listed) if request or listed else None

    async def ask(self, request: PlacementRequest) -> None:
        """Queue a request; a request that exists under that name already is taken to be ours."""
        call = RestCall(
            "POST",
            self._url(request.zone, "queuedResources"),
            query={"queuedResourceId": request.name},
            body=messages.queued_resource(request, self._parent(request.zone)),
        )
        try:
            await self._operate(call)
        except CloudError as error:
            if error.code != Rpc.ALREADY_EXISTS:
                raise

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete the request and the nodes under it; what is gone already is no error."""
        # Without force the node under the request blocks the delete.
        request = RestCall("DELETE", self._url(zone, "queuedResources", name), _FORCE)
        if await self._delete(request):
            return
        for node in slices:
            await self._delete(RestCall("DELETE", self._url(zone, "nodes", node)))

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """The public SSH key of each host, slice by slice, None where it is not published."""
        keys = [await self._keys_of(placement.zone, part.name) for part in placement.slices]
        return [key for part in keys for key in part] if all(keys) else []

    async def _keys_of(self, zone: str, node: str) -> list[str | None]:
        url = self._url(zone, "nodes", node)
        deadline = self._rest.deadline()
        try:
            hosts = messages.count_hosts(await self._rest.send(RestCall("GET", url), deadline))
        except CloudError:
            return []
        ask = RestCall("POST", f"{url}:getGuestAttributes", body={"queryPath": "hostkeys/"})
        try:
            return messages.read_host_keys(await self._rest.send(ask, deadline), hosts)
        except CloudError:
            return [None] * hosts

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """What an error of a call about that zone means."""
        return refusal(error.code, str(error), zone)

    async def bucket_location(self, bucket: str) -> str | None:
        """The location of a bucket: `US-CENTRAL2`, `EU`, …; None where it cannot be read."""
        url = f"{self._storage}/storage/v1/b/{quote(bucket, safe='')}"
        call = RestCall("GET", url, query={"fields": "location"})
        try:
            answer = await self._rest.send(call, self._rest.deadline())
        except CloudError as error:
            if error.code in {Rpc.PERMISSION_DENIED, Rpc.NOT_FOUND}:
                return None
            raise
        location = answer.get("location")
        return location if isinstance(location, str) and location else None

    async def _list(self, zone: str, collection: str) -> list[object]:
        deadline = self._rest.deadline()
        found: list[object] = []
        token = ""
        for _ in range(_MOST_PAGES):
            page = await self._page(zone, collection, token, deadline)
            found += _entries(page, collection)
            following = page.get("nextPageToken")
            if not following:
                return found
            if not isinstance(following, str) or following == token:
                break
            token = following
        raise CloudError(f"the listing of {collection} in {zone} has no end")

    async def _get(self, zone: str, collection: str, name: str) -> list[object]:
        """A list of the entry of that name, empty where there is none."""
        call = RestCall("GET", self._url(zone, collection, name))
        try:
            return [await self._rest.send(call, self._rest.deadline())]
        except CloudError as error:
            if error.code == Rpc.NOT_FOUND:
                return []
            raise

    async def _page(
        self, zone: str, collection: str, token: str, deadline: Deadline
    ) -> dict[str, Any]:
        query = {"pageSize": _PAGE} | ({"pageToken": token} if token else {})
        page = await self._rest.send(RestCall("GET", self._url(zone, collection), query), deadline)
        if page.get("unreachable"):
            # The listing is incomplete, and what is missing in it would count as lost.
            raise CloudError(
                f"the listing of {collection} is incomplete: the cloud could not reach {zone}",
                Rpc.UNAVAILABLE.value,
            )
        return page

    async def _operate(self, call: RestCall) -> None:
        """Start an operation. It may have failed by the time of the answer."""
        answer = await self._rest.send(call, self._rest.deadline())
        trouble = messages.read_trouble(answer.get("error"))
        if trouble is not None:
            raise CloudError(trouble.message, trouble.code)

    async def _delete(self, call: RestCall) -> bool:
        """Delete something; False where it is gone already."""
        try:
            await self._operate(call)
        except CloudError as error:
            if error.code == Rpc.NOT_FOUND:
                return False
            if not (error.code in _REFUSALS and _BEING_DELETED.search(str(error))):
                raise
        return True

    def _parent(self, zone: str) -> str:
        return f"projects/{self._project}/locations/{zone}"

    def _url(self, zone: str, *path: str) -> str:
        parts = ("projects", self._project, "locations", zone, *path)
        return f"{self._base}/v2/{'/'.join(quote(part, safe='') for part in parts)}"


_FORCE = {"force": "true"}
# Codes for a resource that is being deleted: which of them the API sends is undocumented.
_REFUSALS = frozenset({Rpc.INVALID_ARGUMENT, Rpc.FAILED_PRECONDITION, Rpc.ABORTED})


def _entries(page: dict[str, Any], collection: str) -> list[object]:
    entries = page.get(collection)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise CloudError(f"the listing cannot be read: {collection} is no list")
    return entries

"""Implements `protocol.Cloud` with the Cloud TPU API (REST, v2) of Google or of the emulator.

    TpuApi(project, credentials=GoogleCredentials())                              # Google
    TpuApi("local", base_url=url, storage_url=url, ssh_port=None)                 # the emulator

`messages` converts the JSON of the API, and `rest` sends and retries the calls.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx

from drumline.cloud.google import messages, placements
from drumline.cloud.google.credentials import Credentials
from drumline.cloud.google.errors import Rpc, refusal
from drumline.cloud.google.placements import ListedNode, ListedRequest
from drumline.cloud.google.rest import CallLimits, Deadline, Dependencies, RestCall, RestClient
from drumline.cloud.protocol import CloudError, OperationState, PlacementRequest
from drumline.observed import ListedPlacement, Refusal

GOOGLE = "https://tpu.googleapis.com"
STORAGE = "https://storage.googleapis.com"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
SSH_PORT = 22

# The maximum of the API is not documented. It may return fewer entries than requested.
_PAGE_SIZE = "500"
# No project has so many pages. The limit ends a listing whose last page names another page.
_MAX_PAGES = 200
_BEING_DELETED = re.compile(
    r"(?:already|currently|is) (?:being )?delet(?:ed|ing)\b|\bbeing deleted\b"
    r"|\bstate\b[\s:='\"]*(?:is )?DELETING\b|deletion (?:is )?(?:already )?in progress",
    re.IGNORECASE,
)


_NO_GUEST_ATTRIBUTES = {Rpc.NOT_FOUND, Rpc.FAILED_PRECONDITION, Rpc.UNIMPLEMENTED}
"""Answers of a cloud whose hosts publish no guest attributes, or whose project disables them."""


class TpuApi:
    """The Cloud TPU API; see `protocol.Cloud` for the guarantees of each call."""

    def __init__(
        self,
        project: str,
        *,
        base_url: str = GOOGLE,
        storage_url: str = STORAGE,
        resource_manager_url: str = RESOURCE_MANAGER,
        credentials: Credentials | None = None,
        ssh_port: int | None = SSH_PORT,
        limits: CallLimits | None = None,
        dependencies: Dependencies | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open no connection yet.

        Without `credentials`, calls have no token. Without `ssh_port`, each endpoint's own port is
        used, because the emulator's hosts share an address. Google's endpoints have the port of
        the TPU's own service, so the default is 22.
        """
        self._project = project
        self._base = base_url.rstrip("/")
        self._storage = storage_url.rstrip("/")
        self._resource_manager = resource_manager_url.rstrip("/")
        self._ssh_port = ssh_port
        self._credentials = credentials
        self._client = RestClient(
            self._base,
            credentials,
            limits or CallLimits(),
            dependencies or Dependencies(),
            transport,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def requests(self, zone: str) -> list[ListedRequest]:
        """Return all queued resources of the project in a zone."""
        return messages.parse_requests(await self._list(zone, "queuedResources"), zone)

    async def nodes(self, zone: str) -> list[ListedNode]:
        """Return all nodes of the project in a zone."""
        return messages.parse_nodes(await self._list(zone, "nodes"), zone, self._ssh_port)

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """Return all placements of the project in a zone, from one listing of each collection."""
        return placements.combine_listings(
            *await asyncio.gather(self.requests(zone), self.nodes(zone))
        )

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """Return a placement by its name, or None if it does not exist."""
        requests = messages.parse_requests(await self._get(zone, "queuedResources", name), zone)
        request = requests[0] if requests else None
        names = request.nodes if request and request.nodes else (name,)
        entries = [entry for node in names for entry in await self._get(zone, "nodes", node)]
        nodes = messages.parse_nodes(entries, zone, self._ssh_port)
        return placements.combine(request, nodes) if request or nodes else None

    async def ask(self, request: PlacementRequest) -> str:
        """Queue a request. Return the name of the operation that creates it."""
        call = RestCall(
            "POST",
            self._url(request.zone, "queuedResources"),
            query={"queuedResourceId": request.name},
            body=messages.queued_resource(request, self._parent(request.zone)),
        )
        try:
            return await self._start_operation(call)
        except CloudError as error:
            if error.code != Rpc.ALREADY_EXISTS:
                raise
        return ""

    async def operation(self, name: str) -> OperationState | None:
        """Return the state of an operation, or None if the cloud does not know it."""
        call = RestCall("GET", f"{self._base}/v2/{quote(name, safe='/')}")
        try:
            response = await self._client.send(call, self._client.deadline())
        except CloudError as error:
            if error.code == Rpc.NOT_FOUND:
                return None
            raise
        return messages.parse_operation(response)

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a request and its nodes. A request that does not exist is no error."""
        # Without force, the API does not delete a request that has nodes.
        request = RestCall("DELETE", self._url(zone, "queuedResources", name), _FORCE)
        if await self._delete(request):
            return
        for node in slices:
            await self._delete(RestCall("DELETE", self._url(zone, "nodes", node)))

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """Return the public SSH key of each host, slice by slice; None if it is not published."""
        keys = [
            await self._node_host_keys(placement.zone, listed_slice.name)
            for listed_slice in placement.slices
        ]
        return [key for node_keys in keys for key in node_keys] if all(keys) else []

    async def _node_host_keys(self, zone: str, node: str) -> list[str | None]:
        """Return the key of each host, or None where the cloud answers that there is none.

        Any other error is raised: a key that cannot be read may still be published.
        """
        url = self._url(zone, "nodes", node)
        deadline = self._client.deadline()
        hosts = messages.count_hosts(await self._client.send(RestCall("GET", url), deadline))
        call = RestCall("POST", f"{url}:getGuestAttributes", body={"queryPath": "hostkeys/"})
        try:
            return messages.parse_host_keys(await self._client.send(call, deadline), hosts)
        except CloudError as error:
            if error.code in _NO_GUEST_ATTRIBUTES:
                return [None] * hosts
            raise

    async def instance_names(self, placement: ListedPlacement) -> list[str | None]:
        """Return the name of the instance of each host, slice by slice; None if not published."""
        names: list[str | None] = []
        for listed_slice in placement.slices:
            url = f"{self._url(placement.zone, 'nodes', listed_slice.name)}:getGuestAttributes"
            # As gcloud asks for the names of its IAP tunnels: without a path, for all attributes.
            call, hosts = RestCall("POST", url, body={}), len(listed_slice.endpoints)
            try:
                response = await self._client.send(call, self._client.deadline())
                names += messages.parse_instance_names(response, hosts)
            except CloudError as error:
                if error.code not in _NO_GUEST_ATTRIBUTES:
                    raise
                names += [None] * hosts
        return names

    async def granted_permissions(self, permissions: Sequence[str]) -> list[str]:
        """Return those of the permissions that the login has on the project."""
        project = quote(self._project, safe="")
        url = f"{self._resource_manager}/v1/projects/{project}:testIamPermissions"
        call = RestCall("POST", url, body={"permissions": [*permissions]})
        response = await self._client.send(call, self._client.deadline())
        granted = response.get("permissions")
        return [str(name) for name in granted] if isinstance(granted, list) else []

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """Classify an error of a call about a zone."""
        return refusal(error.code, str(error), zone)

    async def check_login(self) -> None:
        """Raise CloudError if there is no token for a call."""
        if self._credentials is not None:
            await self._credentials.token()

    async def bucket_location(self, bucket: str) -> str | None:
        """Return the location of a bucket, such as `US-CENTRAL2`, or None if it is not readable."""
        url = f"{self._storage}/storage/v1/b/{quote(bucket, safe='')}"
        call = RestCall("GET", url, query={"fields": "location"})
        try:
            response = await self._client.send(call, self._client.deadline())
        except CloudError as error:
            if error.code in {Rpc.PERMISSION_DENIED, Rpc.NOT_FOUND}:
                return None
            raise
        location = response.get("location")
        return location if isinstance(location, str) and location else None

    async def _list(self, zone: str, collection: str) -> list[object]:
        deadline = self._client.deadline()
        entries: list[object] = []
        token = ""
        for _ in range(_MAX_PAGES):
            page = await self._page(zone, collection, token, deadline)
            entries += _entries(page, collection)
            next_token = page.get("nextPageToken")
            if not next_token:
                return entries
            if not isinstance(next_token, str) or next_token == token:
                break
            token = next_token
        raise CloudError(f"the listing of {collection} in {zone} has no end")

    async def _get(self, zone: str, collection: str, name: str) -> list[object]:
        """Return a list with the resource of that name, or an empty list."""
        call = RestCall("GET", self._url(zone, collection, name))
        try:
            return [await self._client.send(call, self._client.deadline())]
        except CloudError as error:
            if error.code == Rpc.NOT_FOUND:
                return []
            raise

    async def _page(
        self, zone: str, collection: str, token: str, deadline: Deadline
    ) -> dict[str, Any]:
        query = {"pageSize": _PAGE_SIZE} | ({"pageToken": token} if token else {})
        page = await self._client.send(
            RestCall("GET", self._url(zone, collection), query), deadline
        )
        if page.get("unreachable"):
            # In an incomplete listing, the missing slices would count as lost.
            raise CloudError(
                f"the listing of {collection} is incomplete: the cloud could not reach {zone}",
                Rpc.UNAVAILABLE.value,
            )
        return page

    async def _start_operation(self, call: RestCall) -> str:
        """Start an operation and return its name. Raise CloudError if it has failed already."""
        response = await self._client.send(call, self._client.deadline())
        error = messages.parse_operation(response).error
        if error is not None:
            raise error
        return messages.operation_name(response)

    async def _delete(self, call: RestCall) -> bool:
        """Delete a resource. Return False if it does not exist."""
        try:
            await self._start_operation(call)
        except CloudError as error:
            if error.code == Rpc.NOT_FOUND:
                return False
            if not (error.code in _DELETING_CODES and _BEING_DELETED.search(str(error))):
                raise
        return True

    def _parent(self, zone: str) -> str:
        return f"projects/{self._project}/locations/{zone}"

    def _url(self, zone: str, *path: str) -> str:
        parts = ("projects", self._project, "locations", zone, *path)
        return f"{self._base}/v2/{'/'.join(quote(part, safe='') for part in parts)}"


_FORCE = {"force": "true"}
# The possible codes for a resource that is already being deleted; the API does not document it.
_DELETING_CODES = frozenset({Rpc.INVALID_ARGUMENT, Rpc.FAILED_PRECONDITION, Rpc.ABORTED})


def _entries(page: dict[str, Any], collection: str) -> list[object]:
    entries = page.get(collection)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise CloudError(f"invalid listing: {collection} is not a list")
    return entries

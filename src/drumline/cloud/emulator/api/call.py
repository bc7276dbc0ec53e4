"""One call of the API: its path, its parameters, and how a list is answered.

A list comes in pages. The token of a page is the key of the last thing on the page before, not a
count: so a deletion in between neither hides a thing nor repeats one.
"""

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from starlette.requests import Request as HttpRequest

from drumline.cloud.emulator.service import Service
from drumline.cloud.model.errors import Json, invalid

T = TypeVar("T")
ANY_ZONE = "-"
# Parameters of every Google API.
_STANDARD = frozenset(
    {
        "$.xgafv", "$alt", "access_token", "alt", "callback", "fields", "key", "oauth_token",
        "prettyPrint", "quotaUser", "uploadType", "upload_protocol", "userIp",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call."""

    service: Service
    http: HttpRequest
    body: object

    def path(self, key: str) -> str:
        """A part of the path."""
        return str(self.http.path_params.get(key, ""))

    def query(self, key: str) -> str:
        """A query parameter, in camelCase or snake_case."""
        return self.http.query_params.get(key) or self.http.query_params.get(_snake(key)) or ""

    def check_query(self, known: Iterable[str]) -> None:
        """Refuse query parameters that do not exist, as Google does."""
        takes = _STANDARD.union(*({key, _snake(key)} for key in known))
        for key in self.http.query_params:
            if key not in takes:
                raise invalid(
                    f'Invalid JSON payload received. Unknown name "{key}": Cannot bind query '
                    f"parameter. Field '{key}' could not be found in request message."
                )

    @property
    def request_id(self) -> str:
        """The id under which a caller may repeat the call, if it has one."""
        given = self.query("requestId")
        try:
            return str(UUID(given)) if given else ""
        except ValueError:
            raise invalid(f"Invalid request_id '{given}': must be a UUID", "request_id") from None

    @property
    def zone(self) -> str:
        """The zone in the path."""
        return self.path("zone")

    @property
    def parent(self) -> str:
        """`projects/p/locations/z`."""
        return f"projects/{self.path('project')}/locations/{self.zone}"

    def name(self, collection: str) -> str:
        """The full name of the resource in the path."""
        return f"{self.parent}/{collection}/{self.path('id')}"

    def covered(self, everything: Mapping[str, T]) -> dict[str, T]:
        """Those of the named things that are in the project and zone of the call."""
        found = {}
        for name, thing in everything.items():
            _, project, _, zone, *_ = name.split("/")
            if project == self.path("project") and self.zone in {zone, ANY_ZONE}:
                found[name] = thing
        return found

    def page(self, collection: str, everything: Mapping[str, T], show: Callable[[T], Json]) -> Json:
        """A page of the things, filtered and ordered as requested."""
        size = _size(self.query("pageSize"), self.service.config.page_size)
        names = sorted(everything)
        if token := self.query("pageToken"):
            last = _read_token(token)
            names = [name for name in names if name > last]
        # A list of thousands is read page by page, so only the resources of this page become JSON.
        answer: Json = {collection: [show(everything[name]) for name in names[:size]]}
        if len(names) > size:
            answer["nextPageToken"] = _token(names[size - 1])
        return answer


def _size(asked: str, most: int) -> int:
    try:
        size = int(asked or 0)
    except ValueError:
        size = -1
    if size < 0:
        raise invalid(f"Invalid page_size '{asked}'", "page_size")
    return min(size or most, most)


def _token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except ValueError:
        raise invalid("The page token is invalid", "page_token") from None


def _snake(key: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)

"""The bodies of requests: JSON objects whose fields have known types."""

from collections.abc import Callable
from typing import Any

from drumline.hosts.agent.wire import parse
from drumline.jobs.server.verbs import RequestError


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_object_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_host(value: Any) -> bool:
    return value == "all" or (isinstance(value, int) and not isinstance(value, bool))


def _is_command(value: Any) -> bool:
    return _is_text(value) or _is_texts(value)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "spec": (_is_object, "an object"),
    "origin": (_is_object, "an object"),
    "secrets": (_is_object_of_texts, "an object of texts"),
    "user": (_is_text, "a text"),
    "interpreter": (_is_text, "a text"),
    "allow_large": (_is_boolean, "true or false"),
    "packing": (_is_text, "a text"),
    "names": (_is_texts, "a list of texts"),
    "command": (_is_command, "a text or a list of texts"),
    "host": (_is_host, "a host index or all"),
    "identity": (_is_text, "a text"),
    "why": (_is_text, "a text"),
    "seconds": (_is_number, "a number"),
}
"""The fields of all requests: the check of a value, and its description."""


def read_body(text: bytes) -> dict[str, Any]:
    """Return the fields of a request, without those that are null. Raise RequestError."""
    try:
        body = parse(text)
    except ValueError:
        raise RequestError("the request's body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestError("the request's body is not a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, (is_valid, description) in _FIELDS.items():
        if name in body and not is_valid(body[name]):
            raise RequestError(f"{name}: expected {description}")
    return body

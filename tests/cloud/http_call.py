"""Plain HTTP calls, without a client that knows the API."""

import http.client
import json
from typing import Any


def rest(
    url: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        answer_json = json.loads(answer.read())
    finally:
        connection.close()
    assert isinstance(answer_json, dict)
    return answer.status, answer_json

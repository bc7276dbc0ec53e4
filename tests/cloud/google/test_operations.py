"""The operation that creates a slice: the call returns it, and it may fail later."""

import httpx
import pytest

from drumline.cloud.protocol import OperationState
from tests.cloud.google.scripted import PARENT, Script, ask, fails, ok, refused, run

NAME = f"{PARENT}/operations/operation-17-ab"


def test_a_request_returns_the_name_of_its_operation() -> None:
    assert run(Script([ok(name=NAME, done=False)]), ask) == NAME


def test_a_request_that_exists_already_has_no_known_operation() -> None:
    assert run(Script([refused(409, "ALREADY_EXISTS", "it exists")]), ask) == ""


def test_an_operation_that_has_failed_by_the_time_of_the_answer_is_a_refusal() -> None:
    error = fails(Script([ok(name=NAME, done=True, error={"code": 8, "message": "none"})]), ask)
    assert (error.code, str(error)) == (8, "none")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ok(name=NAME), OperationState(False)),
        (ok(name=NAME, metadata={"cancelRequested": False}), OperationState(False)),
        (ok(name=NAME, done=True, response={}), OperationState(True)),
        (refused(404, "NOT_FOUND", "no such operation"), None),
    ],
)
def test_the_state_of_an_operation(answer: httpx.Response, expected: OperationState | None) -> None:
    script = Script([answer])
    assert run(script, lambda api: api.operation(NAME)) == expected
    assert script.seen[0].url.path == f"/v2/{NAME}"


def test_the_error_of_an_operation_has_the_clouds_message() -> None:
    error = {
        "code": 3,
        "message": "Cloud TPU received a bad request.",
        "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "WHY"}],
    }
    script = Script([ok(name=NAME, done=True, error=error)])
    state = run(script, lambda api: api.operation(NAME))
    assert state is not None
    assert state.done
    assert state.error is not None
    assert (state.error.code, str(state.error)) == (3, "Cloud TPU received a bad request. [WHY]")


def test_a_read_that_fails_raises() -> None:
    script = Script([refused(403, "PERMISSION_DENIED", "no")])
    assert fails(script, lambda api: api.operation(NAME)).code == 7

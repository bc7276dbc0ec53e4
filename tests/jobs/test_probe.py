"""A probe against a cloud that refuses one of its calls."""

import asyncio
import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import pytest

from drumline.cloud.google.rest import CallLimits, Dependencies
from drumline.cloud.google.tpu_api import TpuApi
from drumline.jobs.probe import Probe, ProbeAccess, ProbeLimits, ProbePlan, ProbeReport
from drumline.jobs.slice_settings import NO_SETTINGS

PLAN = ProbePlan("lab-tpu-1", "us-central2-b", "v4-8", "spot")
OPERATION = "projects/lab-tpu-1/locations/us-central2-b/operations/op-1"
STOCKOUT = 'There is no more capacity in the zone "us-central2-b"'


def error(http: int, status: str, message: str) -> httpx.Response:
    body = {"error": {"code": http, "status": status, "message": message}}
    return httpx.Response(http, json=body)


class FakeGoogle:
    """Answers the calls of a probe. A test replaces answers by method and part of the path."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.exists = False
        self.answers: dict[tuple[str, str], Callable[[], httpx.Response]] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(f"{request.method} {request.url.path}")
        for (method, part), answer in self.answers.items():
            if request.method == method and part in request.url.path:
                return answer()
        match request.method:
            case "POST" if "testIamPermissions" in request.url.path:
                return httpx.Response(200, json={"permissions": ["tpu.nodes.list"]})
            case "POST":
                self.exists = True
                return httpx.Response(200, json={"name": OPERATION, "done": False})
            case "DELETE" if self.exists:
                self.exists = False
                return httpx.Response(200, json={"name": OPERATION, "done": True})
            case "GET" if self.exists and "queuedResources" in request.url.path:
                state = {"state": {"state": "WAITING_FOR_RESOURCES"}}
                return httpx.Response(200, json={"name": request.url.path[4:], **state})
            case "GET" if "operations" in request.url.path:
                return httpx.Response(200, json={"name": OPERATION, "done": False})
        return error(404, "NOT_FOUND", "was not found")


def run_probe(
    folder: Path,
    google: FakeGoogle,
    echo: Callable[[str], None] | None = None,
    **limits: Any,
) -> tuple[bool, str, Probe]:
    """Return the result of a probe, its output and the probe."""
    lines: list[str] = []
    report = ProbeReport(folder / "probe.txt", echo or lines.append)
    key = folder / "id"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    access = ProbeAccess(key, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKpublic drumline", folder / "k")
    waits: dict[str, Any] = {"poll": 0.01, "ready": 5, "connect": 1, "delete": 5, "unseen": 0.1}

    async def run() -> tuple[bool, Probe]:
        cloud = TpuApi(
            PLAN.project,
            limits=CallLimits(attempts=1),
            dependencies=Dependencies(on_answer=report.answer),
            transport=httpx.MockTransport(google),
        )
        probe = Probe(cloud, PLAN, NO_SETTINGS, access, report, ProbeLimits(**waits | limits))
        try:
            succeeded = await probe.run()
        finally:
            await cloud.close()
        return succeeded, probe

    try:
        succeeded, probe = asyncio.run(run())
    finally:
        report.close()
    return succeeded, "\n".join(lines), probe


def test_missing_permissions_are_listed_with_their_roles(tmp_path: Path) -> None:
    google = FakeGoogle()
    google.answers["POST", "queuedResources"] = lambda: error(
        403, "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied on 'projects/lab-tpu-1'"
    )
    succeeded, output, probe = run_probe(tmp_path, google)
    assert not succeeded
    assert "tpu.nodes.create (roles/tpu.admin): missing: request slices" in output
    assert "✗ request      the permission tpu.nodes.create is missing" in output
    assert "the cloud's own words: " in output
    assert not probe.may_exist


def test_a_creation_that_fails_later_is_explained(tmp_path: Path) -> None:
    google = FakeGoogle()
    google.answers["GET", "queuedResources"] = lambda: error(404, "NOT_FOUND", "was not found")
    google.answers["GET", "operations"] = lambda: httpx.Response(
        200, json={"name": OPERATION, "done": True, "error": {"code": 8, "message": STOCKOUT}}
    )
    succeeded, output, probe = run_probe(tmp_path, google)
    assert not succeeded
    assert f"the cloud's own words: {STOCKOUT}" in output
    assert not probe.may_exist


def test_a_request_without_an_answer_is_deleted_if_it_appears(tmp_path: Path) -> None:
    google = FakeGoogle()

    def created_without_answer() -> httpx.Response:
        google.exists = True
        return error(503, "UNAVAILABLE", "try again")

    google.answers["POST", "queuedResources"] = created_without_answer
    succeeded, output, _ = run_probe(tmp_path, google)
    assert not succeeded
    assert "✓ deletion     confirmed" in output
    assert not google.exists


def test_a_slice_without_capacity_is_deleted_after_the_wait(tmp_path: Path) -> None:
    google = FakeGoogle()
    succeeded, output, _ = run_probe(tmp_path, google, ready=0.2)
    assert not succeeded
    assert "· state        WAITING_FOR_RESOURCES" in output
    assert output.count("WAITING_FOR_RESOURCES") < 6, "an unchanged answer is printed once"
    assert "try another zone or tier" in output
    assert not google.exists


def test_a_deletion_that_is_denied_says_what_is_left(tmp_path: Path) -> None:
    google = FakeGoogle()
    google.answers["DELETE", ""] = lambda: error(
        403, "PERMISSION_DENIED", "Permission 'tpu.nodes.delete' denied"
    )
    succeeded, output, probe = run_probe(tmp_path, google, ready=0.1)
    assert not succeeded
    assert probe.may_exist
    assert "✗ deletion     not confirmed: " in output
    assert (
        f"gcloud compute tpus queued-resources delete {probe.name} --zone us-central2-b "
        "--project lab-tpu-1 --force"
    ) in output


def test_the_slice_is_deleted_after_the_terminal_was_closed(tmp_path: Path) -> None:
    google = FakeGoogle()

    def closed_after_the_request(line: str) -> None:
        if google.exists:
            raise OSError(errno.EIO, f"cannot print {line}")

    _, _, probe = run_probe(tmp_path, google, closed_after_the_request, ready=0.1)
    assert not google.exists
    assert not probe.may_exist
    assert "✓ deletion     confirmed" in (tmp_path / "probe.txt").read_text()


def test_the_slice_is_deleted_after_the_disk_of_the_report_is_full(tmp_path: Path) -> None:
    google = FakeGoogle()
    (tmp_path / "probe.txt").symlink_to("/dev/full")
    _, output, probe = run_probe(tmp_path, google, ready=0.1)
    assert not google.exists
    assert not probe.may_exist
    assert output.count("the report cannot be written: No space left on device") == 1
    assert "✓ deletion     confirmed" in output


def test_the_slice_is_deleted_after_an_error_that_no_step_expects(tmp_path: Path) -> None:
    google = FakeGoogle()

    def broken_step(line: str) -> None:
        if "state" in line and google.exists and "DELETE" not in "".join(google.calls):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_probe(tmp_path, google, broken_step, ready=0.1)
    assert not google.exists


def test_without_the_resource_manager_permissions_are_not_tested(tmp_path: Path) -> None:
    google = FakeGoogle()
    google.answers["POST", "testIamPermissions"] = lambda: error(
        403, "PERMISSION_DENIED", "Cloud Resource Manager API has not been used in project 1 before"
    )
    _, output, _ = run_probe(tmp_path, google, ready=0.1)
    assert "- permissions  not tested: " in output
    assert "✓ request" in output


def test_the_file_is_private_and_has_no_keys(tmp_path: Path) -> None:
    public_key = "AAAAC3NzaC1lZDI1NTE5AAAAIKpublic"
    _, output, _ = run_probe(tmp_path, FakeGoogle(), ready=0.1)
    path = tmp_path / "probe.txt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert '"ssh-keys": "(removed)"' in path.read_text()
    assert public_key not in path.read_text()
    assert public_key not in output

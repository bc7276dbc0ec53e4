"""Jobs are created only with a login that the cloud may accept."""

from pathlib import Path

import pytest

from drumline.cloud.protocol import CloudError
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import ServerHarness, run_scenario

SPEC = {"accelerator": "v4-16", "run": "python train.py", "workdir": None}
MISSING = "run gcloud auth application-default login"


def test_a_job_is_not_created_without_a_login(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.login_error = CloudError(f"no Google credentials: {MISSING}", 16)
        with pytest.raises(RequestError, match=MISSING) as caught:
            await harness.service.create(SPEC, {}, "me")
        assert "\n" not in str(caught.value)
        assert harness.service.overview() == []
        assert [*(tmp_path / "code").iterdir()] == []
        assert any(MISSING in line for line in (await harness.service.plan(SPEC))["lines"])

    run_scenario(tmp_path, scenario)


def test_a_network_error_does_not_reject_a_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.login_error = CloudError("no answer when refreshing the Google credentials")
        await harness.service.create(SPEC, {}, "me")
        assert len(harness.service.overview()) == 1

    run_scenario(tmp_path, scenario)

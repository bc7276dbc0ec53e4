"""Google's credentials: found, renewed before they expire, and reported if they are missing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from google.auth import credentials as google_auth
from google.auth.exceptions import RefreshError, TransportError

from drumline.cloud.google.credentials import GoogleCredentials, find_project
from drumline.cloud.protocol import CloudError
from tests.cloud.google.scripted import (
    NOW,
    Script,
    list_nodes,
    ok,
    refused,
    run,
)


class FakeLogin(google_auth.Credentials):
    """A fake of google-auth: each refresh returns the next token, valid for an hour."""

    def __init__(self, clock: Callable[[], datetime], *failures: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.failures = list(failures)
        self.refreshes = 0

    def refresh(self, request: object) -> None:
        assert callable(request)
        if self.failures:
            raise self.failures.pop(0)
        self.refreshes += 1
        self.token = f"token {self.refreshes}"
        # UTC without a time zone, like google-auth.
        self.expiry = (self.clock() + timedelta(hours=1)).replace(tzinfo=None)


@dataclass
class Clock:
    at: datetime = NOW

    def __call__(self) -> datetime:
        return self.at


class TestGoogleCredentials:
    def test_a_token_is_kept_until_five_minutes_before_it_expires(self) -> None:
        clock = Clock()
        fake = FakeLogin(clock)
        login = GoogleCredentials(lambda: (fake, "p"), clock)
        tokens = []
        for minutes in (0, 54, 1, 54):
            clock.at += timedelta(minutes=minutes)
            tokens.append(asyncio.run(login.token()))
        assert tokens == ["token 1", "token 1", "token 2", "token 2"]

    def test_many_calls_at_once_refresh_once(self) -> None:
        fake = FakeLogin(Clock())
        login = GoogleCredentials(lambda: (fake, "p"), Clock())

        async def story() -> tuple[set[str], set[str]]:
            first = await asyncio.gather(*(login.token() for _ in range(8)))
            second = await asyncio.gather(*(login.token("token 1") for _ in range(8)))
            return set(first), set(second)

        assert asyncio.run(story()) == ({"token 1"}, {"token 2"})

    def test_an_expired_login_names_the_fix(self) -> None:
        expired = RefreshError("invalid_grant: Bad Request")  # type: ignore[no-untyped-call]
        login = GoogleCredentials(lambda: (FakeLogin(Clock(), expired), None))
        with pytest.raises(CloudError, match="expired: run gcloud auth application") as caught:
            asyncio.run(login.token())
        assert caught.value.code == 16

    def test_a_login_after_the_expired_one_is_used(self) -> None:
        expired = RefreshError("invalid_grant: Bad Request")  # type: ignore[no-untyped-call]
        logins = [FakeLogin(Clock(), expired, expired), FakeLogin(Clock())]
        login = GoogleCredentials(lambda: (logins.pop(0), None), Clock())
        with pytest.raises(CloudError, match="expired"):
            asyncio.run(login.token())
        assert asyncio.run(login.token()) == "token 1"

    @pytest.mark.parametrize(
        "failure",
        [
            TransportError("no route"),  # type: ignore[no-untyped-call]
            RefreshError("busy", retryable=True),  # type: ignore[no-untyped-call]
        ],
    )
    def test_a_network_error_does_not_invalidate_the_login(self, failure: Exception) -> None:
        login = GoogleCredentials(lambda: (FakeLogin(Clock(), failure), None))
        with pytest.raises(CloudError) as caught:
            asyncio.run(login.token())
        assert caught.value.code is None
        assert asyncio.run(login.token()) == "token 1"

    def test_a_missing_login_names_the_fix(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
        with pytest.raises(CloudError, match=r"no Google credentials: .*run gcloud") as caught:
            asyncio.run(GoogleCredentials().token())
        assert caught.value.code == 16
        assert find_project() is None

    def test_the_project_is_the_environments_or_the_logins(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
        assert find_project(lambda: (FakeLogin(Clock()), "mine")) == "mine"
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "named")
        assert find_project(lambda: (FakeLogin(Clock()), "mine")) == "named"

    def test_the_quota_project_is_that_of_google_auth(self) -> None:
        fake = FakeLogin(Clock())
        fake._quota_project_id = "payer"
        login = GoogleCredentials(lambda: (fake, "p"), Clock())
        asyncio.run(login.token())
        assert login.quota_project == "payer"

    def test_the_credentials_work_with_a_tpu_api(self) -> None:
        fake = FakeLogin(Clock())
        login = GoogleCredentials(lambda: (fake, "p"), Clock())
        script = Script([refused(401, "UNAUTHENTICATED", "expired"), ok()])
        run(script, list_nodes, credentials=login)
        assert script.seen[-1].headers["authorization"] == "Bearer token 2"

"""The files and folders under `$DRUMLINE_HOME`."""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class Folders:
    """The layout of the home folder. Only the owner can read it."""

    def __init__(self, home: Path) -> None:
        """Create the folders that do not exist yet."""
        self.home = home
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
        for name in ("ssh", "known_hosts", "code", "logs", "secrets"):
            (home / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def socket(self) -> Path:
        """The socket on which the server listens."""
        return self.home / "server.sock"

    @property
    def lock(self) -> Path:
        """The lock that is held by the one server of this home."""
        return self.home / "server.lock"

    @property
    def database(self) -> Path:
        """The database of jobs, attempts and events."""
        return self.home / "jobs.db"

    @property
    def owners(self) -> Path:
        """The ids of the databases this home has had, apart from them: a database can be lost."""
        return self.home / "owners.json"

    @property
    def key(self) -> Path:
        """The private SSH key, made once; it never leaves this machine."""
        return self.home / "ssh" / "id_ed25519"

    @property
    def emulator(self) -> Path:
        """The local cloud's own folder."""
        return self.home / "emulator"

    @property
    def code(self) -> Path:
        """Archives of working folders, named by the hash of their content."""
        return self.home / "code"

    @property
    def all_known_hosts(self) -> Path:
        """Host keys, one file for each slice."""
        return self.home / "known_hosts"

    def known_hosts(self, slice_name: str) -> Path:
        """Host keys learned for one slice."""
        return self.all_known_hosts / slice_name

    def forget_known_hosts(self, slice_name: str) -> None:
        """Delete the host keys of a slice that is gone."""
        self.known_hosts(slice_name).unlink(missing_ok=True)

    def logs(self, job_id: str, attempt: int | None = None) -> Path:
        """The logs of a job, or of one attempt."""
        of_job = self.home / "logs" / job_id
        return of_job if attempt is None else of_job / str(attempt)

    def remove_logs(self, job_id: str) -> None:
        """Remove every log of a job."""
        shutil.rmtree(self.logs(job_id), ignore_errors=True)

    def keep_secrets(self, job_id: str, values: Mapping[str, str]) -> None:
        """Keep a job's secrets for its later attempts, in a file that only the owner can read."""
        if not values:
            self.forget_secrets(job_id)
            return
        path = self._secrets(job_id)
        new = path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dict(values), file)
        new.rename(path)

    def secrets(self, job_id: str) -> dict[str, str]:
        """A job's secrets."""
        path = self._secrets(job_id)
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @contextmanager
    def new_secrets(self, job_id: str, values: Mapping[str, str]) -> Iterator[None]:
        """Keep these secrets, unless the block raises: then the former ones are restored."""
        before = self.secrets(job_id)
        try:
            self.keep_secrets(job_id, values)
            yield
        except BaseException:
            self.keep_secrets(job_id, before)
            raise

    def forget_secrets(self, job_id: str) -> None:
        """Delete the secrets of a job that has ended."""
        self._secrets(job_id).unlink(missing_ok=True)

    def forget_other_secrets(self, job_ids: Collection[str]) -> None:
        """Delete what a server that died left behind: all but the secrets of these jobs."""
        for path in (self.home / "secrets").iterdir():
            if path.suffix != ".json" or path.stem not in job_ids:
                path.unlink()

    def _secrets(self, job_id: str) -> Path:
        return self.home / "secrets" / f"{job_id}.json"


TRIMMED = "trimmed"
"""The file that marks the folder of an attempt whose logs were removed for the limit."""


def trim(folder: Path, newest: int, most: int) -> None:
    """Remove logs of attempts between the first and the newest until a job's logs fit the limit.

    Both ends are kept, because they show why a job failed: how it began, and how it ended.
    """
    kept = {}
    for number in range(1, newest):
        files = [file for file in (folder / str(number)).glob("host-*") if file.is_file()]
        kept[number] = sum(file.stat().st_size for file in files)
    for number in range(2, newest - 1):
        if sum(kept.values()) <= most:
            return
        if kept[number]:
            shutil.rmtree(folder / str(number), ignore_errors=True)
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / str(number) / TRIMMED).touch()
            kept[number] = 0

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
        for name in ("ssh", "known_hosts", "code", "logs", "outputs", "secrets"):
            (home / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def socket(self) -> Path:
        """The socket on which the server listens."""
        return self.home / "server.sock"

    @property
    def lock(self) -> Path:
        """The lock file of the home's one server."""
        return self.home / "server.lock"

    @property
    def database(self) -> Path:
        """The database of jobs, attempts and events."""
        return self.home / "jobs.db"

    @property
    def owners(self) -> Path:
        """The ids of all databases of this home, in a separate file, because a database can be
        lost."""
        return self.home / "owners.json"

    @property
    def key(self) -> Path:
        """The private SSH key, which is generated once and never leaves this machine."""
        return self.home / "ssh" / "id_ed25519"

    @property
    def emulator(self) -> Path:
        """The folder of the emulated cloud."""
        return self.home / "emulator"

    @property
    def code(self) -> Path:
        """The code archives, named by the hash of their content."""
        return self.home / "code"

    @property
    def known_hosts(self) -> Path:
        """The SSH host keys, one file for each slice."""
        return self.home / "known_hosts"

    def logs(self, job_id: str, attempt: int | None = None) -> Path:
        """Return the folder of a job's logs, or of one attempt's."""
        folder = self.home / "logs" / job_id
        return folder if attempt is None else folder / str(attempt)

    def remove_logs(self, job_id: str) -> None:
        """Delete all logs of a job."""
        shutil.rmtree(self.logs(job_id), ignore_errors=True)

    @property
    def all_outputs(self) -> Path:
        """The files that were copied from hosts, one folder for each job."""
        return self.home / "outputs"

    def outputs(self, job_id: str) -> Path:
        """Return the folder of a job's outputs, which has a folder for each host."""
        return self.all_outputs / job_id

    def outputs_record(self, job_id: str) -> Path:
        """Return the file with what is known of the newest copy of a job's outputs."""
        return self.all_outputs / f"{job_id}.json"

    def remove_outputs(self, job_id: str) -> None:
        """Delete the outputs of a job."""
        shutil.rmtree(self.outputs(job_id), ignore_errors=True)
        self.outputs_record(job_id).unlink(missing_ok=True)

    def save_secrets(self, job_id: str, values: Mapping[str, str]) -> None:
        """Save a job's secrets for its later attempts, in a file that only the owner can read."""
        if not values:
            self.forget_secrets(job_id)
            return
        path = self._secrets(job_id)
        new_path = path.with_suffix(".new")
        descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dict(values), file)
        new_path.rename(path)

    def secrets(self, job_id: str) -> dict[str, str]:
        """Return a job's secrets."""
        path = self._secrets(job_id)
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @contextmanager
    def new_secrets(self, job_id: str, values: Mapping[str, str]) -> Iterator[None]:
        """Save these secrets, and restore the previous ones if the block raises."""
        before = self.secrets(job_id)
        try:
            self.save_secrets(job_id, values)
            yield
        except BaseException:
            self.save_secrets(job_id, before)
            raise

    def forget_secrets(self, job_id: str) -> None:
        """Delete the secrets of a finished job."""
        self._secrets(job_id).unlink(missing_ok=True)

    def forget_other_secrets(self, job_ids: Collection[str]) -> None:
        """Delete secrets that a previous server may have left, except the secrets of these jobs."""
        for path in (self.home / "secrets").iterdir():
            if path.suffix != ".json" or path.stem not in job_ids:
                path.unlink()

    def _secrets(self, job_id: str) -> Path:
        return self.home / "secrets" / f"{job_id}.json"


TRIMMED = "trimmed"
"""The file that marks an attempt's folder whose logs were removed because of the limit."""


def trim_logs(folder: Path, newest: int, max_bytes: int) -> None:
    """Remove the logs of attempts between the first and the newest until the rest fits.

    The first and the last attempts stay, because they show why a job failed.
    """
    sizes = {}
    for attempt in range(1, newest):
        files = [file for file in (folder / str(attempt)).glob("host-*") if file.is_file()]
        sizes[attempt] = sum(file.stat().st_size for file in files)
    for attempt in range(2, newest - 1):
        if sum(sizes.values()) <= max_bytes:
            return
        if sizes[attempt]:
            shutil.rmtree(folder / str(attempt), ignore_errors=True)
            (folder / str(attempt)).mkdir(parents=True, exist_ok=True)
            (folder / str(attempt) / TRIMMED).touch()
            sizes[attempt] = 0

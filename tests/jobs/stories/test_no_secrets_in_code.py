"""No secret in a job's folder reaches a host."""

import os
import subprocess
from pathlib import Path

import pytest

from drumline.jobs import Refused
from drumline.jobs.spec import SpecError
from tests.hosts.packing_table import openssh_key, service_account
from tests.jobs.installation import Installation
from tests.jobs.stories.test_secrets import DRUMLINE, on_hosts

MARK = "planted-7f3a90c2e1"


def plant(folder: Path) -> None:
    """Secrets of every kind, each with the marker in it."""
    texts = {
        ".env": f"TOKEN={MARK}\n",
        "deploy/key.txt": f"{MARK}\n{openssh_key()}",
        "keys/id_rsa": MARK,
        ".netrc": f"machine x login y password {MARK}\n",
        ".aws/credentials": MARK,
        ".ssh/config": MARK,
        "account.json": service_account().replace("a@b", MARK),
        "lab.tfvars": MARK,
        "out/000001/state.bin": MARK,
        "ckpt/000004/drumline/lock": MARK,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "private.txt").write_text(MARK)
    (folder / "private.txt").chmod(0o600)
    (folder / "link").symlink_to("deploy/key.txt")
    for name in ("known_hosts", "ssh", "secrets", "logs"):
        (folder / "state" / name).mkdir(parents=True)
    (folder / "state" / "jobs.db").write_text(MARK)
    (folder / "state" / "secrets" / "000001.json").write_text(MARK)


def test_no_file_on_a_host_holds_a_planted_secret(shared: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    path = shared.write_job(
        f'cat train.py; until [ -e "{gate}" ]; do sleep 0.05; done',
        accelerator="v4-8",
        checkpoint="out",
    )
    (path.parent / "train.py").write_text("# a file that is sent: sent-5ba1\n")
    plant(path.parent)
    new = shared.client.create(path)
    job = str(new["id"])
    assert {entry["path"] for entry in new["left_out"]} == {
        ".aws/", ".env", ".netrc", ".ssh/", "account.json", "ckpt/000004/", "deploy/key.txt",
        "keys/id_rsa", "lab.tfvars", "link", "out/", "private.txt", "state/",
    }  # fmt: skip
    shared.reaches(job, "RUNNING")
    shared.until(lambda: b"sent-5ba1" in b"".join(shared.client.logs(job)), what="the program")
    assert on_hosts(shared, "sent-5ba1")
    assert on_hosts(shared, MARK) == []
    gate.touch()
    assert shared.end(job)["status"] == "SUCCEEDED"


def test_a_job_file_in_the_home_folder_is_exit_code_2_and_nothing_is_created(
    shared: Installation, tmp_path: Path
) -> None:
    home = tmp_path / "user"
    home.mkdir()
    (home / "job.yaml").write_text("accelerator: v4-8\nrun: 'true'\n")
    (home / "notes.txt").write_text(MARK)
    environment = os.environ | {"HOME": str(home), "DRUMLINE_HOME": str(shared.home)}
    jobs = shared.client.list(all=True)
    archives = set((shared.home / "code").iterdir())
    for words in (["--dry-run"], [], ["--json"], ["--set", "workdir=/"]):
        done = subprocess.run(
            [DRUMLINE, "create", str(home / "job.yaml"), *words],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "put the job file in a folder of its own, or set workdir:" in done.stderr
        assert "Traceback" not in done.stderr
    assert set((shared.home / "code").iterdir()) == archives
    with pytest.raises((SpecError, Refused), match="whole file system"):
        shared.client.create({"accelerator": "v4-8", "run": "true", "workdir": "/"})
    assert len(shared.client.list(all=True)) == len(jobs)
    assert on_hosts(shared, MARK) == []

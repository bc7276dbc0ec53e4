"""The outputs of jobs on two emulated hosts are in the home after the job, whatever happened."""

import pytest

from tests.jobs.installation import Installation

# Writes its step every 50 ms, in one file for each host.
WRITER = """
mkdir -p results
echo "attempt $DRUMLINE_ATTEMPT" > "results/attempt-$DRUMLINE_ATTEMPT"
for step in $(seq 1 ${STEPS:-2}); do
  echo "$step" > results/new; mv results/new results/step
  sleep 0.05
done
trap - TERM
echo done > results/done
exit ${CODE:-0}
"""
RESULTS = {"outputs": ["results/"], "environment": {"STEPS": "100000"}, "accelerator": "v4-8"}


def files(installation: Installation, job: str, host: int = 0) -> dict[str, str]:
    folder = installation.home / "outputs" / job / f"host-{host}" / "results"
    return {path.name: path.read_text() for path in folder.glob("*")}


def events(installation: Installation, job: str) -> list[str]:
    shown = installation.client.show(job)
    return [event["text"] for event in shown["events"] if event["kind"] == "outputs"]


def runs(installation: Installation) -> str:
    """Create a job that runs on, and wait for the first copy of its outputs."""
    job = installation.create(WRITER, **RESULTS)
    installation.until(
        lambda: installation.client.show(job)["outputs"]["files"] >= 2, what="a first copy"
    )
    return job


def test_after_a_success_the_outputs_of_every_host_are_there(shared: Installation) -> None:
    job = shared.create(WRITER, outputs=["results/", "*.png"])
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    for host in (0, 1):
        assert files(shared, job, host) == {
            "attempt-1": "attempt 1\n",
            "step": "2\n",
            "done": "done\n",
        }
    outputs = shown["outputs"]
    assert (outputs["files"], outputs["problems"]) == (6, [])
    assert outputs["folder"] == str(shared.home / "outputs" / job)
    assert [host["error"] for host in outputs["hosts"]] == ["", ""]
    assert events(shared, job) == [f"6 files are in {outputs['folder']} (34 bytes)"]
    shared.cloud_is_empty()
    shared.client.delete(job)
    assert files(shared, job)["done"] == "done\n"
    [answer] = shared.client.clean(job)
    assert f"; its outputs stay in {outputs['folder']}" in answer["text"]
    assert files(shared, job)["done"] == "done\n"


@pytest.mark.every_case
def test_after_a_failure_and_after_a_resume_the_outputs_are_there(shared: Installation) -> None:
    environment = {"CODE": "3"}
    job = shared.create(
        WRITER, outputs=["results"], environment=environment, retry={"failures": 0}, keep="0"
    )
    assert shared.end(job)["status"] == "FAILED"
    assert files(shared, job, host=1)["attempt-1"] == "attempt 1\n"
    shared.client.resume(job, overrides=["environment.CODE=0"])
    shared.reaches(job, "SUCCEEDED")
    kept = files(shared, job, host=1)
    assert set(kept) == {"attempt-1", "attempt-2", "step", "done"}, "of both attempts"
    shared.client.clean(job, outputs=True)
    assert not list((shared.home / "outputs").glob(f"{job}*"))


def test_a_preemption_without_notice_loses_the_changes_since_the_last_copy(
    shared: Installation,
) -> None:
    job = runs(shared)
    shared.emulator("preempt", target=job)
    shared.until(lambda: shared.client.show(job)["preemptions"] == 1)
    [text] = events(shared, job)
    assert text.startswith("copied ")
    assert "before the slice was lost: " in text
    assert int(files(shared, job)["step"]) >= 1
    shared.until(lambda: "attempt-2" in files(shared, job), what="a copy of the next attempt")
    assert "attempt-1" in files(shared, job)
    shared.client.delete(job)


@pytest.mark.every_case
def test_with_a_notice_the_files_of_the_last_seconds_are_copied(shared: Installation) -> None:
    run = WRITER.replace("trap - TERM", "").replace(
        "mkdir", "trap 'echo saved > results/at-the-end; exit 75' TERM; mkdir", 1
    )
    job = shared.create(run, **RESULTS)
    shared.until(lambda: bool(files(shared, job)), what="a first copy")
    shared.emulator("preempt", target=job, notice=20.0)
    shared.until(lambda: files(shared, job).get("at-the-end") == "saved\n", what="the last file")
    shared.until(lambda: shared.client.show(job)["preemptions"] == 1)
    shared.client.delete(job)


@pytest.mark.every_case
def test_after_a_cancel_the_last_files_are_there(shared: Installation) -> None:
    job = runs(shared)
    shared.client.cancel(job)
    shared.end(job)
    hosts = shared.home / "emulator" / "hosts"
    [on_host] = hosts.glob(f"*/*0/.drumline/work/{job}/*/results/step")
    assert files(shared, job)["step"] == on_host.read_text()
    shared.client.delete(job)
    shared.cloud_is_empty()


def test_a_server_that_is_killed_during_a_copy_continues_with_it(shared: Installation) -> None:
    run = "mkdir results; head -c 30000000 /dev/zero >results/zeros; echo end >results/end"
    job = shared.create(run, outputs=["results/"], accelerator="v4-8")
    drafts = shared.home / "outputs" / ".drafts"
    shared.until(
        lambda: drafts.is_dir() and bool(list(drafts.iterdir())), what="a copy", every=0.01
    )
    shared.kill_server()
    assert files_sizes(shared, job).get("zeros") in {None, 30_000_000}
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert files_sizes(shared, job) == {"zeros": 30_000_000, "end": 4}
    assert not list(drafts.iterdir())


def files_sizes(installation: Installation, job: str) -> dict[str, int]:
    folder = installation.home / "outputs" / job / "host-0" / "results"
    return {path.name: path.stat().st_size for path in folder.glob("*")}


@pytest.mark.every_case
def test_files_beyond_the_limit_are_reported_and_the_job_succeeds(
    installation: Installation,
) -> None:
    installation.configure(output_megabytes=0.1)
    run = "mkdir results; head -c 300000 /dev/zero >results/zeros; echo end >results/end"
    job = installation.create(run, outputs=["results/"], accelerator="v4-8")
    shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert files_sizes(installation, job) == {"end": 4}
    [problem] = shown["outputs"]["problems"]
    assert problem.startswith("host 0: results/zeros was not copied: 0.3 MB do not fit")
    assert problem in events(installation, job)[0]

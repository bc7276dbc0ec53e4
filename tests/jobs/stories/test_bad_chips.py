"""Faulty chips on the emulator: detected, avoided, recorded and refused."""

from typing import Any

import pytest

from tests.jobs.installation import Installation

# A training of 60 steps that prints the fingerprint of its parameters.
TRAINING = """
import os
import numpy as np
import optax
import drumline.distributed
from drumline.models import MLP
from drumline.train import Recipe, Settings, data, fingerprint, fit

drumline.distributed.initialize()
random = np.random.default_rng(0)
columns = {
    "image": random.normal(size=(256, 4, 4, 1)).astype(np.float32),
    "label": random.integers(0, 10, 256).astype(np.int32),
}
recipe = Recipe(
    model=MLP(input_dim=16, hidden_sizes=(32,)),
    optimizer=optax.adam(1e-3),
    data=data.arrays(columns, batch=64),
    mesh={"data": -1},
    steps=60,
    settings=Settings(save_every=10, check_every=10),
)
result = fit(recipe, checkpoint=os.environ["DRUMLINE_CHECKPOINT"])
print("learnt", fingerprint(result.state.params), flush=True)
raise SystemExit(result.ending.exit_code)
"""
MACHINE = "local-a-v4-4-1"
"""Host 1 of the first slice of two hosts."""


def outcomes(shown: dict[str, Any]) -> list[str]:
    return [attempt["outcome"] for attempt in shown["attempts"]]


def remembered(installation: Installation) -> dict[str, dict[str, Any]]:
    return {host["identity"]: host for host in installation.client.known_hosts()}


@pytest.mark.every_case
@pytest.mark.long
def test_a_burn_in_finds_the_lying_host_and_later_jobs_refuse_it(
    installation: Installation,
) -> None:
    installation.emulator("break", target=MACHINE, how="lies", chip=2)
    keys = {"zones": ["local-a"], "retry": {"failures": 0, "bad_hosts": 0}}
    first = installation.end(installation.create("echo ran", burnin="short", **keys))
    assert (first["status"], outcomes(first)) == ("SUCCEEDED", ["bad host", "succeeded"])
    assert (first["failures"], first["bad_hosts"]) == (0, 1)
    messages = [event["text"] for event in first["events"] if event["kind"] == "badhost"]
    assert "of host 1 computes wrong" in messages[0]
    liar = remembered(installation)[MACHINE]
    assert (liar["state"], liar["evidence"][0]["proof"]) == ("excluded", "burn-in")
    assert liar["evidence"][0]["job"] == first["id"]
    # The scheduler prefers machines that were free longest, so the next job gets the faulty one.
    second = installation.end(installation.create("echo ran", **keys))
    assert (second["status"], outcomes(second)) == ("SUCCEEDED", ["bad host", "succeeded"])
    assert len(remembered(installation)[MACHINE]["evidence"]) == 2
    installation.client.exclude_host(MACHINE, "enough of it")
    third = parked_until_it_runs_elsewhere(installation, **keys)
    assert (third["status"], outcomes(third)) == ("SUCCEEDED", ["succeeded"])
    assert [event["text"] for event in third["events"] if event["kind"] == "refused"] == [
        f"host 1, {MACHINE} is excluded: enough of it"
    ]
    installation.cloud_is_empty()


def parked_until_it_runs_elsewhere(installation: Installation, **keys: Any) -> dict[str, Any]:
    """Create a job that holds back the slice with the bad host; end it when it runs on another."""
    job = installation.create("until test -e go; do sleep 0.1; done", parking=1, **keys)
    installation.until(lambda: bool(installation.client.show(job)["parked"]), what="a parked slice")
    parked = installation.client.show(job)["parked"][0]["name"]
    installation.until(
        lambda: installation.status(job) == "RUNNING", what="the job to run elsewhere"
    )
    installation.client.exec(job, "touch go", host="all")
    shown = installation.end(job)
    kinds = [event["kind"] for event in shown["events"]]
    assert kinds.index("parked") < kinds.index("run")
    assert any(event["text"].startswith(f"{parked} (8 chips") for event in shown["events"])
    return shown


@pytest.mark.long
@pytest.mark.every_case
def test_a_fault_that_begins_during_training_is_replayed_without_loss(
    installation: Installation,
) -> None:
    def train() -> str:
        file = installation.write_job(
            "python train.py", checkpoint="gs://runs/here", zones=["local-a"]
        )
        (file.parent / "train.py").write_text(TRAINING)
        return str(installation.client.create(file)["id"])

    installation.emulator("break", target=MACHINE, how="lies", from_step=30)
    disturbed, undisturbed = (installation.end(train()) for _ in range(2))
    assert (disturbed["status"], outcomes(disturbed)) == ("SUCCEEDED", ["bad host", "succeeded"])
    assert disturbed["failures"] == 0
    liar = remembered(installation)[MACHINE]
    assert (liar["state"], liar["evidence"][0]["proof"]) == ("excluded", "replay")
    assert disturbed["attempts"][1]["course"]["resumed"] == 30
    assert learnt(installation, disturbed) == learnt(installation, undisturbed)


def learnt(installation: Installation, shown: dict[str, Any]) -> str:
    text = b"".join(installation.client.logs(shown["id"], host=0)).decode()
    (line,) = {line.split("learnt ")[1] for line in text.splitlines() if "learnt " in line}
    return line


@pytest.mark.long
@pytest.mark.every_case
def test_a_host_that_no_program_can_start_on_takes_two_attempts_and_never_a_third(
    installation: Installation,
) -> None:
    installation.emulator("break", target=MACHINE, how="vfio")
    tried = []
    for _ in range(3):
        shown = installation.end(installation.create("echo ran", zones=["local-a"]))
        assert shown["status"] == "SUCCEEDED"
        assert shown["failures"] == 0
        tried.append(outcomes(shown).count("bad host"))
    assert sum(tried) == 2, tried
    assert remembered(installation)[MACHINE]["state"] == "excluded"
    installation.cloud_is_empty()

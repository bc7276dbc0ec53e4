"""Train on the digits through a preemption, and show that the result is the same.

    drumline create examples/quickstart.yaml --follow

Every host runs this program. On the emulator, host 0 of the first attempt preempts the slice as
soon as there is a checkpoint, and the next attempt resumes from it. At the end the same recipe is
trained without interruption, and the parameters of both runs are compared bit by bit.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
from digits import recipe

import drumline.distributed
from drumline import heartbeat
from drumline.train import Ending, Result, fingerprint, fit


def main() -> int:
    """Train, compare, and return the exit code."""
    if "DRUMLINE_EMULATED" in os.environ and is_first_attempt_on_host_0():
        threading.Thread(target=preempt_slice, daemon=True).start()
    drumline.distributed.initialize()
    folder = os.environ["DRUMLINE_CHECKPOINT"]
    # The next attempt does not compile again.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    result = fit(recipe(), checkpoint=folder)
    if result.ending is not Ending.DONE:
        return result.ending.exit_code
    reference = train_undisturbed()
    if reference.ending is not Ending.DONE:
        return reference.ending.exit_code
    same = fingerprint(result.state.params) == fingerprint(reference.state.params)
    accuracy = f"test accuracy {100 * result.metrics['eval_accuracy']:.1f} %"
    verdict = f"parameters identical to an undisturbed run: {'yes' if same else 'no'}"
    heartbeat(step=result.step, checkpoint=result.step, result=f"{accuracy}\n{verdict}")
    print(f"{accuracy}, {verdict}")
    return 0 if same else 1


def train_undisturbed() -> Result:
    """Train without checkpoints and heartbeats."""
    print("training again, undisturbed:")
    heartbeat_file = os.environ.pop("DRUMLINE_HEARTBEAT")
    result = fit(recipe())
    os.environ["DRUMLINE_HEARTBEAT"] = heartbeat_file
    return result


def is_first_attempt_on_host_0() -> bool:
    """Return True in the process that preempts the slice."""
    return (os.environ["DRUMLINE_ATTEMPT"], os.environ["DRUMLINE_HOST"]) == ("1", "0")


def preempt_slice() -> None:
    """Wait for a checkpoint, then make the emulator preempt the slice."""
    heartbeat_file, job = Path(os.environ["DRUMLINE_HEARTBEAT"]), os.environ["DRUMLINE_JOB_ID"]
    while not (
        heartbeat_file.exists() and json.loads(heartbeat_file.read_text()).get("checkpoint")
    ):
        time.sleep(0.05)
    subprocess.run([sys.executable, "-m", "drumline", "emulator", "preempt", job], check=True)


if __name__ == "__main__":
    sys.exit(main())

"""Trains on the digits, loses its slice on the way, and shows that nothing was lost.

    drumline create examples/quickstart.yaml --follow

Every host runs this. On the emulator, host 0 of the first attempt has the slice taken away once
there is a checkpoint; the next attempt goes on from it. At the end the same recipe is trained once
more without a stop, and the parameters of both are compared bit by bit.
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
    if "DRUMLINE_EMULATED" in os.environ and first_on_host_0():
        threading.Thread(target=lose_the_slice, daemon=True).start()
    drumline.distributed.initialize()
    folder = os.environ["DRUMLINE_CHECKPOINT"]
    # What one attempt has compiled, the next one finds.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    trained = fit(recipe(), checkpoint=folder)
    if trained.ending is not Ending.DONE:
        return trained.ending.exit_code
    again = undisturbed()
    if again.ending is not Ending.DONE:
        return again.ending.exit_code
    same = fingerprint(trained.state.params) == fingerprint(again.state.params)
    accuracy = f"test accuracy {100 * trained.metrics['eval_accuracy']:.1f} %"
    verdict = f"parameters identical to an undisturbed run: {'yes' if same else 'no'}"
    heartbeat(step=trained.step, checkpoint=trained.step, result=f"{accuracy}\n{verdict}")
    print(f"{accuracy}, {verdict}")
    return 0 if same else 1


def undisturbed() -> Result:
    """The same training without a checkpoint; it shows in the log alone."""
    print("once more, undisturbed:")
    pulse = os.environ.pop("DRUMLINE_HEARTBEAT")
    result = fit(recipe())
    os.environ["DRUMLINE_HEARTBEAT"] = pulse
    return result


def first_on_host_0() -> bool:
    """Whether it is here, and now, that the slice is to be lost."""
    return (os.environ["DRUMLINE_ATTEMPT"], os.environ["DRUMLINE_HOST"]) == ("1", "0")


def lose_the_slice() -> None:
    """Wait for a checkpoint, then ask the emulator to do what a cloud does unasked."""
    told, job = Path(os.environ["DRUMLINE_HEARTBEAT"]), os.environ["DRUMLINE_JOB_ID"]
    while not (told.exists() and json.loads(told.read_text()).get("checkpoint")):
        time.sleep(0.05)
    subprocess.run([sys.executable, "-m", "drumline", "emulator", "preempt", job], check=True)


if __name__ == "__main__":
    sys.exit(main())

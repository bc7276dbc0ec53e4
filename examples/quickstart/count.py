"""Counts with a checkpoint: the smallest program that loses nothing.

    drumline create examples/quickstart.yaml --follow

Each host adds to a running hash, saves it every few steps, and after a preemption goes on from its
last save. At the end it computes the whole chain once more without interruption and compares. On
the emulator, host 0 of the first attempt asks for its slice to be taken half-way.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from drumline.heartbeat import heartbeat

STEPS = 40
SAVE_EVERY = 5
HOST = int(os.environ["DRUMLINE_HOST"])
ATTEMPT = int(os.environ["DRUMLINE_ATTEMPT"])
SAVED = Path(os.environ["DRUMLINE_CHECKPOINT"]) / f"host-{HOST}.json"


def advance(value: str, step: int) -> str:
    """One step of the work."""
    return hashlib.sha256(f"{value}/{step}".encode()).hexdigest()


def save(step: int, value: str) -> None:
    """Whole or not at all: a half-written checkpoint must never be read."""
    SAVED.parent.mkdir(parents=True, exist_ok=True)
    new = SAVED.with_suffix(".new")
    new.write_text(json.dumps({"step": step, "value": value}))
    new.replace(SAVED)


def lose_the_slice_once() -> None:
    """On the emulator, in the first attempt, have the cloud take the slice away."""
    if "DRUMLINE_EMULATED" in os.environ and ATTEMPT == 1 and HOST == 0:
        job = os.environ["DRUMLINE_JOB_ID"]
        subprocess.run([sys.executable, "-m", "drumline", "emulator", "preempt", job], check=True)


def main() -> None:
    """Count from the last save to the end."""
    saved = json.loads(SAVED.read_text()) if SAVED.exists() else {"step": 0, "value": ""}
    step, value = saved["step"], saved["value"]
    print(f"attempt {ATTEMPT}, host {HOST}: going on from step {step}")
    while step < STEPS:
        step += 1
        value = advance(value, step)
        heartbeat(step=step, total=STEPS)
        if step % SAVE_EVERY == 0 or step == STEPS:
            save(step, value)
        if step == STEPS // 2 + 2:
            lose_the_slice_once()
        time.sleep(0.1)
    undisturbed = ""
    for number in range(1, STEPS + 1):
        undisturbed = advance(undisturbed, number)
    print(f"host {HOST}: {value[:12]} after {STEPS} steps, undisturbed: {undisturbed[:12]}")
    sys.exit(value != undisturbed)


if __name__ == "__main__":
    main()

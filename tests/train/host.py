"""The program of each host in test_two_hosts.py, with several runs in sequence.

    python host.py FOLDER

All runs share two processes, because starting a process is slow. The results are written to
`<folder>/result-<host>.json`. The last run is stopped from outside.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import drumline.distributed
from drumline.train import Data, fingerprint, fit
from drumline.train.save_interval import VARIABLE
from tests.train.toy import ROWS, Slow, toy


def main(folder: Path) -> int:
    """Run everything and return the exit code of the last run."""
    drumline.distributed.initialize()
    host = jax.process_index()

    two_host_run = fit(toy(12, mesh=-1, save_every=6), checkpoint=folder / "whole")

    rows = {name: column.copy() for name, column in ROWS.items()}
    rows["x"][3 * 16 + 11] = np.nan  # row 11 of batch 3 is host 1's
    data_with_bad_row = Data(Slow(0.0, rows), batch=16, shuffle=False)
    stopped_run = fit(replace(toy(6, mesh=-1), data=data_with_bad_row), checkpoint=None)

    # Each host knows another lifetime of slices, and has other times of steps and saves.
    os.environ[VARIABLE] = ("1e6", "0.05")[host]
    auto_recipe = toy(12, mesh=-1, save_every="auto", keep_last=100)
    auto_run = fit(auto_recipe, checkpoint=folder / "auto")

    (folder / f"result-{host}.json").write_text(
        json.dumps(
            {
                "whole": fingerprint(two_host_run.state),
                "auto": fingerprint(auto_run.state),
                "save_every": auto_run.metrics["save_every"],
                "loss": two_host_run.metrics["loss"],
                "report": stopped_run.report,
                "ending": stopped_run.ending.exit_code,
                "step": stopped_run.step,
            }
        )
    )
    slow_data = Data(Slow(0.02), batch=16, seed=7, threads=1)
    long_recipe = replace(toy(10_000, mesh=-1, save_every=5_000), data=slow_data)
    return fit(long_recipe, checkpoint=folder / "stopped").ending.exit_code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.exit(code)

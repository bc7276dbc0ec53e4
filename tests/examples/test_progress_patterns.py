"""The patterns in the job files of programs that we cannot change find the steps in their logs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.jobs.controller.heartbeats import LogReader

EXAMPLES = Path(__file__).parents[2] / "examples"

# From MaxText's guide to its logs, then as its logger has written them since, while the batch grows
# and with a loss that is lost; between them what it says of other things.
MAXTEXT = """\
Per train step:
 Total TFLOPs: 764.67
completed step: 9, seconds: 5.667, TFLOP/s/device: 134.924, Tokens/s/device: 8672.758, \
total_weights: 196608, loss: 10.374
I0102 03:04:05.678901 139 metric_logger.py:172] completed step: 10, seconds: 5.668, \
TFLOP/s/device: 134.911, Tokens/s/device: 8671.946, total_weights: 196608, loss: 10.440, \
lm_loss: 10.430, perplexity: 33860.351, moe_lb_loss: 0.010
[Rampup Batch Size Phase], completed step: 11, seconds: 1.5, total_weights: 4096, loss: 9.5, \
lm_loss: 9.5, perplexity: 13359.727
Completed eval after train step 11, loss=9.412, perplexity=12234.1, total_weights=5000.0
completed step: 12, seconds: 1.341, TFLOP/s/device: 257.929, Tokens/s/device: 36653.244, loss: nan
"""

# As its metric writer, its chronometer and absl's logging format them.
BIG_VISION = """\
I0102 03:04:05.678901 139 train.py:114] \x1b[33mNOTE\x1b[0m: Steps:0/112590 [0.0%]
I0102 03:04:06.678901 139 utils.py:1277] \x1b[35m[50]\x1b[0m global_schedule = 0.005
I0102 03:04:06.678901 139 utils.py:1277] \x1b[35m[50]\x1b[0m training_loss = 6.913572788238525
I0102 03:04:06.678901 139 utils.py:1277] \x1b[35m[50]\x1b[0m img/sec/core = 1234.5
I0102 03:04:06.678901 139 train.py:114] \x1b[33mNOTE\x1b[0m: Steps:50/112590 [0.0%]
Walltime:1m (0s eval)
ETA:5h
I0102 03:04:07.678901 139 utils.py:1277] \x1b[35m[50]\x1b[0m val/prec@1 = 0.0011
"""


def told(job: str, log: str, folder: Path) -> list[dict[str, Any]]:
    """What the job manager reads from a log."""
    pattern = yaml.safe_load((EXAMPLES / f"{job}.yaml").read_text())["progress"]
    (folder / "host-0.log").write_text(log)
    return LogReader(folder, pattern).read_new()


def test_maxtext_tells_step_loss_and_speed(tmp_path: Path) -> None:
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert told("maxtext", MAXTEXT, tmp_path) == [
        {"step": 9, "loss": 10.374, "tokens_per_device_per_second": 8672.758},
        {"step": 10, "loss": 10.44, "tokens_per_device_per_second": 8671.946},
        {"step": 11, "loss": 9.5},
        {"step": 12, "loss": nan, "tokens_per_device_per_second": 36653.244},
    ]


def test_big_vision_tells_step_total_loss_and_speed(tmp_path: Path) -> None:
    assert told("big_vision", BIG_VISION, tmp_path) == [
        {"step": 0, "total": 112590},
        {"step": 50, "loss": 6.913572788238525},
        {"step": 50, "images_per_core_per_second": 1234.5},
        {"step": 50, "total": 112590},
    ]

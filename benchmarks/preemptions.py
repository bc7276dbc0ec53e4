"""Compare a training job that is disturbed N times at random moments with an undisturbed one.

    .venv/bin/python benchmarks/preemptions.py [N] [CONFIG] [SEED]

CONFIG is a file in examples/, by default `digits`. Both jobs run on a separate emulator, on two
hosts of four devices. The exit code is 1 unless the parameters of both are bit-identical.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.jobs.installation import temporary_installation
from tests.stories.disturbances import Target, disturb, draw_disturbances, parameters, train

SAVE_EVERY = 7


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    config = sys.argv[2] if len(sys.argv) > 2 else "digits"
    rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)  # noqa: S311
    steps = 10 * count + 20
    with (
        tempfile.TemporaryDirectory() as folder,
        temporary_installation(Path(folder)) as installation,
    ):
        start = time.monotonic()
        undisturbed_job = train(installation, config, steps=steps, save_every=SAVE_EVERY)
        undisturbed = parameters(installation, undisturbed_job, timeout=600)
        undisturbed_seconds = time.monotonic() - start
        start = time.monotonic()
        disturbed_job = train(installation, config, steps=steps, save_every=SAVE_EVERY)
        disturbances = draw_disturbances(count, steps, rng)
        attempts = disturb(Target(installation, disturbed_job, rng), disturbances, timeout=600)
        disturbed = parameters(installation, disturbed_job, timeout=600)
        disturbed_seconds = time.monotonic() - start
        disturbed_report = installation.client.show(disturbed_job)
    print(f"{'attempt':>7}  {'what':32}{'it ended as':20}{'steps':>12}")
    for disturbance, attempt in zip(disturbances, attempts, strict=True):
        course = attempt["course"]
        steps_run = f"{course['resumed'] or 0:.0f} to {course['step']:.0f}" if course else "none"
        print(f"{attempt['number']:>7}  {disturbance!s:32}{attempt['outcome']:20}{steps_run:>12}")
    print(f"{'steps':32}{steps:>8}")
    print(f"{'steps repeated':32}{disturbed_report['steps_again'] or 0:>8}")
    print(f"{'seconds undisturbed':32}{undisturbed_seconds:>8.0f}")
    print(f"{'seconds with all disturbances':32}{disturbed_seconds:>8.0f}")
    identical = disturbed == undisturbed
    print(
        f"parameters {disturbed}, undisturbed {undisturbed}: "
        f"{'the same' if identical else 'OTHERS'}"
    )
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())

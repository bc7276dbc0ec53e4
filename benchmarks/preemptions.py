"""A training job that is disturbed N times at random moments, against one that is not.

    .venv/bin/python benchmarks/preemptions.py [N] [CONFIG] [SEED]

CONFIG is a file in examples/, `digits` unless told otherwise. Runs on an emulator of its own, on
two hosts of four devices. Exits 1 unless the parameters of both runs are the same to the last bit.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.jobs.world import a_world
from tests.stories.disturbances import Target, disturb, draw, parameters, train

SAVE_EVERY = 7


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    config = sys.argv[2] if len(sys.argv) > 2 else "digits"
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)  # noqa: S311
    steps = 10 * count + 20
    with tempfile.TemporaryDirectory() as folder, a_world(Path(folder)) as world:
        begin = time.monotonic()
        first = train(world, config, steps=steps, save_every=SAVE_EVERY)
        undisturbed = parameters(world, first, timeout=600)
        whole = time.monotonic() - begin
        begin = time.monotonic()
        job = train(world, config, steps=steps, save_every=SAVE_EVERY)
        blows = draw(count, steps, chance)
        struck = disturb(Target(world, job, chance), blows, timeout=600)
        disturbed = parameters(world, job, timeout=600)
        took = time.monotonic() - begin
        shown = world.client.show(job)
    print(f"{'attempt':>7}  {'what':32}{'it ended as':20}{'steps':>12}")
    for blow, attempt in zip(blows, struck, strict=True):
        course = attempt["course"]
        ran = f"{course['resumed'] or 0:.0f} to {course['step']:.0f}" if course else "none"
        print(f"{attempt['number']:>7}  {blow!s:32}{attempt['outcome']:20}{ran:>12}")
    print(f"{'steps':32}{steps:>8}")
    print(f"{'steps run again':32}{shown['steps_again'] or 0:>8}")
    print(f"{'seconds undisturbed':32}{whole:>8.0f}")
    print(f"{'seconds with all disturbances':32}{took:>8.0f}")
    same = disturbed == undisturbed
    print(f"parameters {disturbed}, undisturbed {undisturbed}: {'the same' if same else 'OTHERS'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""The limits of loss and gradient norm, and slow hosts."""

import numpy as np
import pytest

from drumline.errors import UserError
from drumline.train import Settings
from drumline.train.alarms import FIRST_PAUSE, WARM_UP, Alarms
from drumline.train.probe import SLOW_CHECKS, VERY_SLOW_CHECKS, SlowHosts


def alarms_after(losses: np.ndarray, norms: np.ndarray | None = None) -> Alarms:
    alarms = Alarms(1.4, 2.0)
    for loss, norm in zip(losses, losses if norms is None else norms, strict=True):
        alarms.accept(float(loss), float(norm))
    return alarms


def test_twice_the_median_exceeds_the_limit_after_the_warm_up() -> None:
    noise = np.random.default_rng(0).normal(size=WARM_UP)
    before_warm_up, after_warm_up = (
        alarms_after(3 + 0.05 * noise[:n]) for n in (WARM_UP - 1, WARM_UP)
    )
    assert before_warm_up.limits == (np.inf, np.inf)
    loss, norm = after_warm_up.limits
    assert 3.3 < loss < 1.4 * 3.1
    assert 5.5 < norm < 2.0 * 3.1


@pytest.mark.parametrize("level", [0.0, 1e-6, -2.0, -0.3])
def test_a_loss_near_zero_or_below_is_limited_by_its_deviation(level: float) -> None:
    normal_losses = level + 0.1 * np.random.default_rng(1).normal(size=100)
    loss, _ = alarms_after(normal_losses, np.ones(100)).limits
    assert normal_losses.max() < loss < level + 2.0


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_but_healthy_run_alarms_rarely(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = np.arange(5000)
    mean_loss = 1 + 9 * np.exp(-steps / 500)
    # Batches differ by half, and one in a hundred is three times as hard.
    losses = mean_loss * random.lognormal(0, 0.4, 5000) * np.where(random.random(5000) < 0.01, 3, 1)
    alarms, alarm_count = Alarms(1.4, 2.0), 0
    for loss in losses:
        if loss > alarms.limits[0]:
            alarm_count += 1
            alarms.clear()
        alarms.accept(float(loss), 1.0)
    assert alarm_count <= 10


def test_a_false_alarm_causes_a_pause_and_the_next_a_longer_pause() -> None:
    alarms = alarms_after(np.ones(100))
    pauses = []
    for _ in range(3):
        assert alarms.limits[0] < 2
        alarms.clear()
        pause = 0
        while alarms.limits[0] == np.inf:
            alarms.accept(1.0, 1.0)
            pause += 1
        pauses.append(pause)
    assert pauses[0] >= FIRST_PAUSE
    assert pauses[1] >= 2 * FIRST_PAUSE
    assert pauses[2] >= 4 * FIRST_PAUSE


def test_loss_and_norm_have_separate_alarms() -> None:
    alarms = Alarms(None, 2.0)
    for _ in range(100):
        alarms.accept(1.0, 1.0)
    assert alarms.limits == (np.inf, 2.0)
    with pytest.raises(UserError, match=r"alarm_loss: 0\.9 is not a valid factor"):
        Settings(alarm_loss=0.9)
    with pytest.raises(UserError, match="check_every: 0 is not a number of steps"):
        Settings(check_every=0)


def test_a_slow_host_is_reported_once_and_a_very_slow_host_sooner() -> None:
    hosts = SlowHosts()
    messages = [hosts.update([1.0, 1.3, 1.01, 0.99]) for _ in range(2 * SLOW_CHECKS)]
    assert messages[SLOW_CHECKS - 1][0].startswith("host 1 is slow: it takes 1.3")
    assert sum(map(len, messages)) == 1
    very_slow = [
        SlowHosts().update([1.0]),
        *(hosts.update([1.0, 1.0, 5.0, 1.0]) for _ in range(VERY_SLOW_CHECKS)),
    ]
    assert [len(faults) for faults in very_slow] == [0] * VERY_SLOW_CHECKS + [1]
    # An occasional slow check does not make a host slow.
    occasionally_slow = SlowHosts()
    for check in range(10 * SLOW_CHECKS):
        assert not occasionally_slow.update([1.0, 2.0 if check % SLOW_CHECKS else 1.0])

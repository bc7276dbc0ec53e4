"""When a loss or a norm is worth a second look, and when a host is slow."""

import numpy as np
import pytest

from drumline.train import Mistake, Settings
from drumline.train.watch.alarms import REST, WARM_UP, Alarms
from drumline.train.watch.slow import CHECKS, FEW, SlowHosts


def alarms_after(losses: np.ndarray, norms: np.ndarray | None = None) -> Alarms:
    alarms = Alarms(1.4, 2.0)
    for loss, norm in zip(losses, losses if norms is None else norms, strict=True):
        alarms.accept(float(loss), float(norm))
    return alarms


def test_twice_the_usual_is_beyond_the_limit_once_enough_is_known() -> None:
    noise = np.random.default_rng(0).normal(size=WARM_UP)
    early, enough = (alarms_after(3 + 0.05 * noise[:n]) for n in (WARM_UP - 1, WARM_UP))
    assert early.limits == (np.inf, np.inf)
    loss, norm = enough.limits
    assert 3.3 < loss < 1.4 * 3.1
    assert 5.5 < norm < 2.0 * 3.1


@pytest.mark.parametrize("level", [0.0, 1e-6, -2.0, -0.3])
def test_a_loss_near_zero_or_below_is_watched_by_its_usual_deviation(level: float) -> None:
    usual = level + 0.1 * np.random.default_rng(1).normal(size=100)
    loss, _ = alarms_after(usual, np.ones(100)).limits
    assert usual.max() < loss < level + 2.0


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_but_healthy_run_alarms_rarely(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = np.arange(5000)
    usual = 1 + 9 * np.exp(-steps / 500)
    # Batches that differ by half, and one in a hundred that is three times as hard.
    losses = usual * random.lognormal(0, 0.4, 5000) * np.where(random.random(5000) < 0.01, 3, 1)
    alarms, times = Alarms(1.4, 2.0), 0
    for loss in losses:
        if loss > alarms.limits[0]:
            times += 1
            alarms.acquit()
        alarms.accept(float(loss), 1.0)
    assert times <= 10


def test_an_alarm_for_nothing_buys_a_rest_and_the_next_a_longer_one() -> None:
    alarms = alarms_after(np.ones(100))
    rests = []
    for _ in range(3):
        assert alarms.limits[0] < 2
        alarms.acquit()
        rest = 0
        while alarms.limits[0] == np.inf:
            alarms.accept(1.0, 1.0)
            rest += 1
        rests.append(rest)
    assert rests[0] >= REST
    assert rests[1] >= 2 * REST
    assert rests[2] >= 4 * REST


def test_each_is_watched_or_not_by_itself() -> None:
    alarms = Alarms(None, 2.0)
    for _ in range(100):
        alarms.accept(1.0, 1.0)
    assert alarms.limits == (np.inf, 2.0)
    with pytest.raises(Mistake, match=r"alarm_loss: 0\.9 times the usual is no alarm"):
        Settings(alarm_loss=0.9)
    with pytest.raises(Mistake, match="check_every: 0 is not a number of steps"):
        Settings(check_every=0)


def test_a_slow_host_is_told_once_after_many_checks_and_a_very_slow_one_after_few() -> None:
    hosts = SlowHosts()
    said = [hosts.heard([1.0, 1.3, 1.01, 0.99]) for _ in range(2 * CHECKS)]
    assert said[CHECKS - 1][0].startswith("host 1 is slow: the same product took it 1.3")
    assert sum(map(len, said)) == 1
    gross = [SlowHosts().heard([1.0]), *(hosts.heard([1.0, 1.0, 5.0, 1.0]) for _ in range(FEW))]
    assert [len(each) for each in gross] == [0] * FEW + [1]
    # Now and then is not slow.
    fickle = SlowHosts()
    for check in range(10 * CHECKS):
        assert not fickle.heard([1.0, 2.0 if check % CHECKS else 1.0])

"""The old public names of drumline.train work and warn with the new names."""

import numpy as np
import pytest

import drumline.train
from drumline.errors import UserError
from drumline.train import data


def test_mistake_is_user_error() -> None:
    with pytest.warns(DeprecationWarning, match="Mistake is now drumline.errors:?.?UserError"):
        assert drumline.train.Mistake is UserError


def test_the_position_in_the_data_has_its_old_keyword() -> None:
    source = data.arrays({"n": np.arange(9)}, batch=3)
    rows = np.arange(3)
    with pytest.warns(DeprecationWarning, match="position="):
        old_numbers = source.numbers(taken=3, rows=rows)  # type: ignore[call-arg]
    assert np.array_equal(old_numbers, source.numbers(position=3, rows=rows))

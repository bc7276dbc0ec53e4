"""Old public names work for one release and warn with the new name."""

import pytest

from drumline import chips


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Place", "ZoneOffer"),
        ("lay_mesh", "mesh_order"),
        ("places", "zone_offers"),
        ("tour", "ring_order"),
    ],
)
def test_an_old_name_is_the_new_one_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"drumline.chips.{old} is now .*{new}"):
        assert getattr(chips, old) is getattr(chips, new)


def test_old_arguments_work_and_warn() -> None:
    v4 = chips.slice_of("v4-8")
    with pytest.warns(DeprecationWarning, match=r"wanted=\) is now tpu_slice="):
        assert chips.zone_offers(wanted=v4) == chips.zone_offers(v4)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"wanted=\) is now tpu_slice="):
        price = chips.price(wanted=v4, zone="us-central2-b", tier="spot")  # type: ignore[call-arg]
    assert price == chips.price(v4, "us-central2-b", "spot")
    with pytest.warns(DeprecationWarning, match=r"tour=\) is now order="):
        assert chips.closes(tour=((0,), (1,)), topology=(2,), wraps=(False,))  # type: ignore[call-arg]

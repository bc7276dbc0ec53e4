"""`repeat` reports functions that do not repeat and faulty devices."""

# mypy: allow-untyped-calls

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.errors import UserError
from drumline.numerics.repetition import LeafDifference, repeat, run_on


def layer(x: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
    return {"logits": jax.nn.softmax(x @ w), "norm": jnp.linalg.norm(x)}


def random_operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return (
        random.standard_normal((4, 16)).astype(np.float32),
        random.standard_normal((16, 8)).astype(np.float32),
    )


def test_a_deterministic_function_gives_the_same_bits_on_four_devices() -> None:
    repetition = repeat(layer, random_operands(), devices=jax.devices()[:4])
    assert repetition.identical
    assert repetition.majority
    assert repetition.verdict == "identical: 3 runs on each of 4 devices gave the same bits"
    assert [device.device for device in repetition.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert json.loads(json.dumps(repetition.to_dict()))["identical"] is True


def test_every_run_is_on_its_device() -> None:
    output_devices = []

    def run(function: Any, inputs: tuple[Any, ...], device: jax.Device) -> Any:
        outputs = run_on(function, inputs, device)
        output_devices.append(set.union(*(leaf.devices() for leaf in jax.tree.leaves(outputs))))
        return outputs

    devices = jax.devices()[2:5]
    repeat(layer, random_operands(), devices=devices, runs=1, run=run)
    repeat(lambda: jnp.arange(3.0), devices=devices, runs=1, run=run)
    assert output_devices == [{device} for device in devices] * 2


def test_a_function_that_counts_does_not_repeat() -> None:
    calls = itertools.count()

    def counting_function(x: jax.Array) -> dict[str, jax.Array]:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        count = jax.pure_callback(lambda: np.float32(next(calls)), shape)
        return {"same": x, "noisy": x.at[1].add(count)}

    repetition = repeat(counting_function, (jnp.ones(3),), devices=jax.devices()[:1], runs=4)
    assert not repetition.identical
    assert repetition.verdict == "different: 4 runs on the same inputs do not repeat on cpu:0"
    (device,) = repetition.devices
    assert device.odd_runs == (1, 2, 3)
    assert [(leaf.leaf, leaf.elements, leaf.first) for leaf in device.among_runs] == [
        ("noisy", 1, (1,))
    ]
    all_devices = repeat(counting_function, (jnp.ones(3),), devices=jax.devices()[:2], runs=2)
    assert all_devices.verdict == (
        "different: 2 runs on the same inputs do not repeat on any device"
    )


def faulty_device(device_id: int, odd_run: int | None = None) -> Any:
    """Return a `run` with logits that are three ulps off on one device, always or in one run."""
    runs = itertools.count()

    def run(function: Any, inputs: tuple[Any, ...], device: jax.Device) -> Any:
        outputs = run_on(function, inputs, device)
        if device.id == device_id and odd_run in (None, next(runs)):
            logits = np.array(outputs["logits"])
            logits.view(np.int32)[2, 5] += 3
            logits.view(np.int32)[3, 0] -= 1
            outputs["logits"] = logits
        return outputs

    return run


def test_a_faulty_device_is_named() -> None:
    repetition = repeat(layer, random_operands(), devices=jax.devices()[:4], run=faulty_device(2))
    assert repetition.verdict == "different: cpu:2 does not agree with the other 3"
    assert [device.agrees for device in repetition.devices] == [True, True, False, True]
    assert all(device.repeats for device in repetition.devices)
    assert repetition.devices[2].from_others == (LeafDifference("logits", 2, 32, (2, 5), 3),)
    assert str(repetition.devices[2].from_others[0]) == (
        "logits: 2 of 32 elements, up to 3 ulp, first at logits[2, 5]"
    )


def test_the_first_device_may_be_the_faulty_one() -> None:
    repetition = repeat(layer, random_operands(), devices=jax.devices()[:3], run=faulty_device(0))
    assert repetition.verdict == "different: cpu:0 does not agree with the other 2"


def test_a_single_odd_run_is_not_a_disagreement() -> None:
    repetition = repeat(
        layer, random_operands(), devices=jax.devices()[:3], run=faulty_device(1, odd_run=1)
    )
    assert repetition.verdict == "different: 3 runs on the same inputs do not repeat on cpu:1"
    assert repetition.devices[1].odd_runs == (1,)
    assert repetition.devices[1].agrees


def test_a_device_that_does_not_repeat_has_no_vote() -> None:
    """Two stable devices outvote one with a different result in each run."""
    runs = itertools.count(1)

    def run(function: Any, inputs: tuple[Any, ...], device: jax.Device) -> Any:
        outputs = run_on(function, inputs, device)
        return outputs if device.id else {**outputs, "norm": outputs["norm"] + next(runs)}

    repetition = repeat(layer, random_operands(), devices=jax.devices()[:3], runs=2, run=run)
    assert repetition.verdict == "different: 2 runs on the same inputs do not repeat on cpu:0"
    assert repetition.majority
    assert [device.agrees for device in repetition.devices] == [False, True, True]


def test_two_devices_have_no_majority() -> None:
    repetition = repeat(layer, random_operands(), devices=jax.devices()[:2], run=faulty_device(1))
    assert not repetition.majority
    assert repetition.verdict == "different: the 2 devices disagree, and no result has a majority"


def report_of(*outputs: Any) -> Any:
    """Return the report of two runs on one device with these outputs."""
    results = iter(outputs)
    return repeat(
        lambda: jnp.zeros(()),
        devices=jax.devices()[:1],
        runs=len(outputs),
        run=lambda *_: next(results),
    )


def test_bits_are_compared_and_not_values() -> None:
    with_nan = np.array([np.nan, 1.0], np.float32)
    assert report_of(with_nan, with_nan.copy()).identical
    signed_zeros = report_of(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert signed_zeros.devices[0].among_runs == (LeafDifference("", 1, 1, (0,), 1),)
    payload = with_nan.copy()
    payload.view(np.int32)[0] += 1
    different_payload = report_of(with_nan, payload)
    assert different_payload.devices[0].among_runs[0].ulps is None
    assert "NaN against other bits" in str(different_payload.devices[0].among_runs[0])


@pytest.mark.parametrize(
    ("first", "second", "ulps"),
    [
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), 1),
        (np.float64(-1), np.float64(1), 2 * 0x3FF0000000000000 + 1),
        (jnp.bfloat16(1), jnp.bfloat16(1.0078125), 1),
        (np.complex64(1 + 1j), np.complex64(1 + 1.0000002j), 2),
        (np.int32(-5), np.int32(7), 12),
        (np.uint64(2**64 - 1), np.uint64(0), 2**64 - 1),
        (np.int64(-(2**63)), np.int64(2**63 - 1), 2**64 - 1),
        (np.True_, np.False_, 1),
    ],
)
def test_ulps_between_two_values(first: Any, second: Any, ulps: int) -> None:
    (difference,) = report_of(np.array(first), np.array(second)).devices[0].among_runs
    assert (difference.first, difference.ulps) == ((), ulps)


def test_random_keys_are_inputs_and_outputs() -> None:
    def split_and_draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        next_key, current_key = jax.random.split(key)
        return next_key, jax.random.normal(current_key, (4,))

    repetition = repeat(split_and_draw, (jax.random.key(0),), devices=jax.devices()[:2], runs=2)
    assert repetition.identical


@pytest.mark.parametrize(("runs", "devices"), [(0, 2), (-1, 2), (3, 0), (1, 1)])
def test_too_few_runs_are_a_user_error(runs: int, devices: int) -> None:
    with pytest.raises(UserError, match=r"^repeat: "):
        repeat(layer, random_operands(), devices=jax.devices()[:devices], runs=runs)


def test_inputs_that_are_not_arrays_are_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^repeat: inputs\[0\]\['mode'\] is 'train', no array"):
        repeat(lambda options: options["x"], ({"x": 1.0, "mode": "train"},))

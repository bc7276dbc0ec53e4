"""Non-finite numbers are found and named, and no step waits for the check."""

# mypy: allow-untyped-calls

import pickle
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from drumline.errors import UserError
from drumline.numerics import finite
from drumline.numerics.finite import NotFinite, check_finite, first_not_finite

reduction: Any = finite._reduce


@pytest.fixture(autouse=True)
def _empty_queue() -> Iterator[None]:
    finite._local.queue.clear()
    yield
    finite._local.queue.clear()


def with_bad_value(
    shape: tuple[int, ...], position: tuple[int, ...], value: float, dtype: Any
) -> Any:
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    x[position] = value
    return jnp.asarray(x)


def test_an_error_names_leaf_position_kind_and_step() -> None:
    query = np.ones((3, 4, 5), np.float32)
    query[1, 2, 3] = -np.inf
    query[2, 0, 0] = np.nan
    params = {"blocks": {"query": query, "shift": np.ones(3, np.float32)}, "steps": np.array([7])}
    with pytest.raises(NotFinite) as error_info:
        check_finite(params, "params", step=12, wait=True)
    assert str(error_info.value) == (
        "step 12: params.blocks.query[1, 2, 3] is -inf; 2 of 60 are not finite"
    )
    assert error_info.value.element.position == (1, 2, 3)
    assert isinstance(error_info.value, ArithmeticError)
    assert str(pickle.loads(pickle.dumps(error_info.value))) == str(error_info.value)  # noqa: S301


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"],
)
def test_every_type_is_checked(dtype: str) -> None:
    random = np.random.default_rng(1)
    kinds = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
    if dtype == "float8_e4m3fn":
        kinds = {"nan": np.nan}  # it has no infinities
    for kind, value in kinds.items():
        position = tuple(int(random.integers(size)) for size in (6, 7))
        x = with_bad_value((6, 7), position, value, jnp.dtype(dtype))
        element = first_not_finite([x]).read()
        assert element is not None
        assert (element.leaf, element.position, element.kind) == ("tree.0", position, kind)
        assert (element.count, element.size) == (1, 42)


def test_double_precision_and_imaginary_parts() -> None:
    with jax.enable_x64():
        element = first_not_finite(with_bad_value((9,), (4,), np.nan, np.float64)).read("loss")
        assert str(element) == "loss[4] is nan; 1 of 9 are not finite"
        # The value is infinite in single precision only.
        check_finite(jnp.full(3, 1e300), wait=True)
    element = first_not_finite({"z": jnp.array([1 + 1j, complex(1, -np.inf)])}).read()
    assert str(element) == "tree.z[1] is -inf; 1 of 2 are not finite"


def test_the_first_element_of_the_first_leaf_is_found() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        leaves = [random.standard_normal((5, 8)).astype(np.float32) for _ in range(4)]
        for leaf in leaves:
            leaf[random.random(leaf.shape) < 0.01] = np.nan
        element = first_not_finite(leaves).read()
        bad_leaves = [index for index, leaf in enumerate(leaves) if not np.isfinite(leaf).all()]
        if not bad_leaves:
            assert element is None
            continue
        first = leaves[bad_leaves[0]]
        assert element is not None
        assert element.leaf == f"tree.{bad_leaves[0]}"
        assert element.position == tuple(np.argwhere(np.isnan(first))[0])
        assert element.count == np.isnan(first).sum()


@pytest.mark.parametrize(
    "tree",
    [
        {},
        None,
        [jnp.zeros((0, 3)), np.zeros(0, np.float32)],
        {"step": jnp.arange(3), "name": "vit", "rate": 0.1, "flag": jnp.array(True)},
        [jax.random.key(0), jnp.ones(2)],
        jnp.float32(3),
    ],
)
def test_finite_trees_raise_nothing(tree: Any) -> None:
    check_finite(tree, wait=True)


def test_a_single_number_is_checked() -> None:
    with pytest.raises(NotFinite, match=r"^loss is inf; 1 of 1 are not finite$"):
        check_finite(jnp.float32(np.inf), "loss", wait=True)


class Moments(NamedTuple):
    mean: Any
    square: Any


def test_paths_are_readable() -> None:
    state = {"adam": (Moments(jnp.ones(2), [jnp.ones(1), jnp.array([1.0, np.nan])]),)}
    with pytest.raises(NotFinite, match=r"^state\.adam\.0\.square\.1\[1\] is nan"):
        check_finite(state, "state", wait=True)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (11, 2), (2, 2, 2, 9)])
def test_leaves_with_too_many_elements_have_several_axis_groups(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduction.clear_cache()
    monkeypatch.setattr(finite, "_MAX_POSITIONS", 6)
    random = np.random.default_rng(3)
    for _ in range(20):
        x = np.ones(shape, np.float32)
        x[random.random(shape) < 0.2] = np.inf
        element = first_not_finite([np.ones(2, np.float32), x]).read()
        if element is None:
            assert np.isfinite(x).all()
        else:
            assert element.position == tuple(np.argwhere(np.isinf(x))[0])
            assert (element.leaf, element.kind) == ("tree.1", "inf")
    reduction.clear_cache()


def test_axis_groups_cover_leaves_of_any_size() -> None:
    assert finite._axis_groups((1024, 1024)) == [(0, 2)]
    assert finite._axis_groups(()) == [(0, 0)]
    assert finite._axis_groups((65536, 65536)) == [(0, 1), (1, 2)]
    assert finite._axis_groups((2**31 + 5,)) == [(0, 1), (1, 1)]
    assert finite._axis_groups((2**20, 2**31, 2**12, 2**12)) == [(0, 1), (1, 2), (2, 4)]


def test_a_leaf_larger_than_memory_compiles() -> None:
    """Check a leaf whose position and count need more than 31 bits."""
    huge_leaf = jax.ShapeDtypeStruct((3, 2**31 + 1), jnp.bfloat16)
    assert jax.eval_shape(first_not_finite, huge_leaf).encoded.shape == (5,)


def test_shards_on_several_devices_are_checked() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    for spec in (("data", "model"), ("data",), (None, "data"), ()):
        x = np.ones((8, 16), np.float32)
        x[5, 9] = np.nan
        x[5, 11] = np.inf
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        with pytest.raises(NotFinite, match=r"^w\.0\[5, 9\] is nan; 2 of 128"):
            check_finite([sharded, np.ones(3, np.float32)], "w", wait=True)


def test_shards_are_checked_without_moving_them() -> None:
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    assert "all-gather" not in reduction.lower((x,)).compile().as_text()


class PendingResult:
    """A result that becomes ready when the test sets `ready`."""

    def __init__(self, encoded: Any) -> None:
        self.encoded, self.ready, self.reads = encoded, False, 0

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None:
        pass

    def addressable_data(self, index: int) -> Any:
        self.reads += 1
        return self.encoded.addressable_data(index)


@pytest.fixture
def pending_results(monkeypatch: pytest.MonkeyPatch) -> list[PendingResult]:
    """Return the results of all reductions, in order, which become ready on request only."""
    pending_results: list[PendingResult] = []
    reduce = finite._reduce

    def reduce_later(leaves: Any) -> PendingResult:
        pending_results.append(PendingResult(reduce(leaves)))
        return pending_results[-1]

    monkeypatch.setattr(finite, "_reduce", reduce_later)
    return pending_results


GOOD, BAD = jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])


def test_no_call_waits(pending_results: list[PendingResult]) -> None:
    check_finite(GOOD, step=0)
    check_finite(BAD, step=1)
    check_finite(GOOD, step=2)
    assert [result.reads for result in pending_results] == [0, 0, 0]
    pending_results[0].ready = True
    check_finite(GOOD, step=3)
    assert [result.reads for result in pending_results] == [1, 0, 0, 0]
    pending_results[1].ready = True
    with pytest.raises(NotFinite, match=r"^step 1: tree"):
        check_finite(GOOD, step=4)


def test_an_error_is_raised_once(pending_results: list[PendingResult]) -> None:
    check_finite(BAD, step=0)
    check_finite(BAD, step=1)
    pending_results[0].ready = pending_results[1].ready = True
    with pytest.raises(NotFinite, match=r"^step 0"):
        check_finite(BAD, step=2)
    check_finite(GOOD, step=3, wait=True)


def test_waiting_reads_all(pending_results: list[PendingResult]) -> None:
    check_finite(GOOD)
    check_finite(GOOD)
    check_finite(GOOD, wait=True)
    assert [result.reads for result in pending_results] == [1, 1, 1]


def test_a_host_far_ahead_waits_for_the_oldest(
    pending_results: list[PendingResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "MAX_PENDING", 3)
    for _ in range(5):
        check_finite(GOOD)
    assert [result.reads for result in pending_results] == [1, 1, 0, 0, 0]


def test_threads_have_their_own_queues(pending_results: list[PendingResult]) -> None:
    check_finite(BAD)
    pending_results[0].ready = True
    raised: list[BaseException] = []

    def check_in_thread() -> None:
        try:
            check_finite(GOOD, wait=True)
        except NotFinite as error:
            raised.append(error)

    thread = threading.Thread(target=check_in_thread)
    thread.start()
    thread.join()
    assert raised == []
    with pytest.raises(NotFinite):
        check_finite(GOOD)


def test_a_tree_may_be_donated_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.array([1.0, jnp.inf])
    with monkeypatch.context() as patched:
        patched.setattr(finite._PendingCheck, "is_ready", lambda _: False)
        check_finite({"x": x}, "state")
    step(x)
    assert x.is_deleted()
    with pytest.raises(NotFinite, match=r"^state\.x\[1\] is inf; 1 of 2"):
        check_finite({}, wait=True)


def test_a_jitted_step_can_return_the_check() -> None:
    @jax.jit
    def step(params: Any) -> tuple[Any, finite.FirstNotFinite]:
        updated = jax.tree.map(jnp.log, params)
        return updated, first_not_finite(updated)

    _, good_check = step({"w": jnp.ones((2, 2))})
    check_finite(good_check, "params", step=1, wait=True)
    _, bad_check = step({"w": jnp.array([[1.0, 2.0], [0.0, -1.0]])})
    with pytest.raises(NotFinite, match=r"^step 2: params\.w\[1, 0\] is -inf; 2 of 4"):
        check_finite(bad_check, "params", step=2, wait=True)


def test_a_traced_tree_is_a_user_error() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        check_finite({"x": x}, "params")
        return x

    with pytest.raises(UserError, match=r"params is being traced .* use first_not_finite"):
        step(GOOD)


def test_each_structure_is_compiled_once() -> None:
    reduction.clear_cache()
    for i in range(5):
        check_finite({"a": jnp.full(3, float(i)), "b": jnp.ones((2, 2))}, wait=True)
    assert reduction._cache_size() == 1


def test_large_host_numbers_are_finite() -> None:
    check_finite({"a": np.array([1e300, -1e300]), "b": 1e300, "c": np.float64(1e200)}, wait=True)
    with pytest.raises(NotFinite, match=r"tree\.loss is nan"):
        check_finite({"loss": float("nan")}, wait=True)
    with pytest.raises(NotFinite, match=r"tree\.a\[1\] is -inf"):
        check_finite({"a": np.array([1e300, -np.inf])}, wait=True)

"""The profile of a real trace of eight emulated devices."""

# mypy: allow-untyped-calls

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.profiles import Profile, read_profile
from drumline.inspect.profiles.report import compare_profile, read_estimate, summarize
from tests.inspect.profiles.traces import Plane, Stats, TraceEvent, write

RUNS = 3
TRIPS = 4


def step(x: Any, w: Any) -> Any:
    rows = lax.all_gather(x, "x", axis=0, tiled=True)  # the gather

    def body(carry: Any, _: Any) -> Any:
        carry = jnp.tanh(carry @ w)
        return lax.ppermute(carry, "x", [(i, (i + 1) % 8) for i in range(8)]), None  # the permute

    rows, _ = lax.scan(body, rows, None, length=TRIPS)
    parts = lax.psum_scatter(rows, "x", tiled=True)  # the scatter
    return lax.psum(parts.sum(), "x")  # the sum


def line_of(comment: str) -> str:
    for line_number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if line.endswith(f"# {comment}"):
            return f"{Path(__file__).name}:{line_number}"
    raise AssertionError(comment)


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    mesh = jax.make_mesh((8,), ("x",))
    specs: Any = (P("x"), P())
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    random = np.random.default_rng(0)
    x = jax.device_put(random.normal(size=(64, 32)), NamedSharding(mesh, P("x")))
    w = jax.device_put(random.normal(size=(32, 32)), NamedSharding(mesh, P()))
    jax.block_until_ready(run(x, w))
    with jax.profiler.trace(str(folder)):
        for _ in range(RUNS):
            jax.block_until_ready(run(x, w))
    return folder


@pytest.fixture(scope="module")
def profile(trace_folder: Path) -> Profile:
    return read_profile(trace_folder)


def test_a_profile_has_every_device_and_step(profile: Profile) -> None:
    assert [device.name for device in profile.devices] == [f"CPU {n}" for n in range(8)]
    assert (profile.steps, profile.steps_from) == (RUNS, "runs of jit_step")
    assert profile.module == "jit_step"


def test_each_collective_has_its_kind_its_line_and_its_count(profile: Profile) -> None:
    results = {(row.kind, Path(row.source).name): row.count for row in profile.communication}
    assert results == {
        ("all-gather", line_of("the gather")): 1,
        ("collective-permute", line_of("the permute")): TRIPS,
        ("reduce-scatter", line_of("the scatter")): 1,
        ("all-reduce", line_of("the sum")): 1,
    }
    assert all(row.exposed > 0 for row in profile.communication)


def test_the_time_of_a_device_adds_up(profile: Profile) -> None:
    for device in profile.devices:
        assert 0 < device.computing < device.busy <= device.span
        assert device.computing + device.exposed == pytest.approx(device.busy)
    # The loop is not listed, because its time belongs to its body.
    assert "while" not in {operation.kind for operation in profile.operations}


def test_the_matmul_is_found_at_its_line(profile: Profile) -> None:
    line_number = int(line_of("the permute").partition(":")[2]) - 1
    body = [
        operation
        for operation in profile.operations
        if operation.source.endswith(f".py:{line_number}")
    ]
    assert sum(operation.count for operation in body) >= TRIPS


def test_a_matmul_on_other_threads_hides_a_collective_until_its_end(tmp_path: Path) -> None:
    """The matmul's own event ends at 2, when it is handed to other threads. Its computation ends at
    40.
    """

    def event(name: str, start: float, end: float, mark: int) -> TraceEvent:
        stats: Stats = {"hlo_op": name, "hlo_module": "jit_f", "device_ordinal": 0, "_p": mark}
        return TraceEvent(name, start, end, stats)

    thread = [event("dot.1", 0, 2, 11), event("psum.2", 2, 50, 12), event("tanh.3", 50, 60, 13)]
    ends = [
        TraceEvent("end: tanh.3", 59, 60, {"_c": 13}),
        TraceEvent("end: psum.2", 49, 50, {"_c": 12}),
    ]
    pool = [TraceEvent("end: dot.1", 39, 40, {"_c": 11})]
    plane = Plane("/host:CPU", {"tf_XLAPjRtCpuClient/1": [*thread, *ends], "tf_XLAEigen/2": pool})
    results = read_profile(write(tmp_path, plane))
    (all_reduce,) = results.communication
    assert (all_reduce.kind, all_reduce.count) == ("all-reduce", 1)
    assert all_reduce.hidden == pytest.approx(38e-6)
    assert all_reduce.exposed == pytest.approx(10e-6)
    assert {row.name: round(1e6 * row.seconds) for row in results.operations} == {
        "dot.1": 40,
        "tanh.3": 10,
    }


def test_a_profile_of_one_device_equals_its_part_of_the_whole(
    trace_folder: Path, profile: Profile
) -> None:
    (device_profile,) = read_profile(trace_folder, 5).devices
    assert device_profile == profile.devices[5]


def test_a_comparison_with_an_estimate_names_the_largest_difference(
    profile: Profile, tmp_path: Path
) -> None:
    """Compare with an estimate without the permute that is right about everything else."""
    report = profile.to_dict()
    report["communication"] = [
        row for row in report["communication"] if row["kind"] != "collective-permute"
    ]
    (permute,) = [e for e in profile.communication if e.kind == "collective-permute"]
    report["seconds"] -= permute.exposed
    file = tmp_path / "estimate.json"
    file.write_text(json.dumps(report))
    comparison = compare_profile(profile, read_estimate(file))
    largest_first = [part for part in comparison.parts if part.subject != "nothing runs"]
    assert (largest_first[0].subject, largest_first[0].source) == (
        "wait for collective-permute",
        line_of("the permute"),
    )
    assert largest_first[0].seconds == pytest.approx(comparison.total.seconds)
    assert all(part.seconds == pytest.approx(0, abs=1e-12) for part in largest_first[1:])


def test_the_summary_fits_on_ten_lines(profile: Profile) -> None:
    lines = summarize(profile)
    assert len(lines) <= 10
    assert "waits for communication" in lines[0]
    assert "cores" in lines[-1]

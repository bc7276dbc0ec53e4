"""The examples that `drumline inspect` lists: what each sends is what theory says.

The chapter's programs are at the chapter's sizes, and every figure here is worked out from the
shapes and the ring algorithm, not taken from a report.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from drumline.errors import UserError
from drumline.inspect import Communication, Estimate, communication, estimate
from drumline.inspect.examples import Example, examples, find_example
from drumline.inspect.examples.program import Program
from tests.inspect.expected import (
    Expected,
    all_gather,
    all_reduce,
    all_to_all,
    expected_counts,
    permute,
    reduce_scatter,
    told_counts,
)

KIB, MIB = 2**10, 2**20
BF16, INT = "bfloat16", "int32"

# Each device's share of the collective matmul on X=2,Y=4: A[512, 512], products [512, 8192] before
# they are summed, [512, 2048] where D or F is what comes out.
A_SHARD = 512 * 512 * 2
PRODUCT = 512 * 8192 * 2
NARROW = 512 * 2048 * 2


@dataclass(frozen=True)
class Known:
    """What is known of an example beforehand."""

    sentence: str
    """As the report has it, behind the function's name."""
    sends: tuple[Expected, ...] = ()
    bound: tuple[str, ...] = ("network",)
    """What its time is bound by on its own slice; several where theory has them close together."""
    looped: int = 0
    """How many of its collectives stand in a loop as long as the data ask for."""


def rings(*operands: tuple[int, str], ways: int) -> tuple[Expected, ...]:
    """Three hops round a ring of four, in one stream or in two of half the size."""
    return tuple(permute("Y", size // ways, dtype, count=3 * ways) for size, dtype in operands)


def exchanged(k: int) -> tuple[Expected, ...]:
    """Experts in rounds, k for each token.

    A quarter of the balanced share for each of four peers: 256·k/4/4 = 16·k rows, which go out with
    1024 of 2048 columns, are gathered over Y and come back with 4096; and before that, how many
    tokens each device has for each of 16 experts, and the number of rounds.
    """
    out, back = 4 * 16 * k * 1024 * 4, 4 * 16 * k * 4096 * 4
    return (
        all_gather("X", 4, 16 * 4, INT),
        all_reduce("X", 4, 4, INT),
        all_to_all("X", 4, out),
        all_gather("Y", 2, out),
        all_to_all("X", 4, back),
    )


SILENT = "does not communicate."
KNOWN: dict[str, Known] = {
    # bf16[4, 8192] on each device. 16 MiB of weights are read for four rows of A.
    "first-jit-matmul": Known(
        "sends 64 KiB a device: 1 all-reduce over Y.",
        (all_reduce("Y", 2, 4 * 8192 * 2, BF16),),
        ("memory",),
    ),
    # bf16[256, 2048] on each device. At 256 rows a v5e computes about as long as it reads.
    "sharding-constraint": Known(
        "sends 1 MiB a device: 1 all-reduce over Y.",
        (all_reduce("Y", 2, 256 * 2048 * 2, BF16),),
        ("network", "memory", "compute"),
    ),
    "no-sharding-constraint": Known(SILENT, (), ("memory", "compute")),
    "slice-and-average": Known(
        "sends 28 B a device: 1 all-reduce over x and y.", (all_reduce("xy", 8, 16, INT),)
    ),
    # 1.5 MiB over a link of 45 GB/s are 35 µs, the product is 22 µs; a ring hides some of either.
    "collective-matmul-jit": Known(
        "sends 1.5 MiB a device: 1 all-gather over Y.", (all_gather("Y", 4, A_SHARD, BF16),)
    ),
    "collective-matmul-ring": Known(
        "sends 1.5 MiB a device: 3 collective-permutes over Y.",
        rings((A_SHARD, BF16), ways=1),
        ("network", "compute"),
    ),
    "collective-matmul-one-way": Known(
        "sends 1.5 MiB a device: 3 collective-permutes over Y.",
        rings((A_SHARD, BF16), ways=1),
        ("network", "compute"),
    ),
    "collective-matmul-both-ways": Known(
        "sends 1.5 MiB a device: 6 collective-permutes over Y.",
        rings((A_SHARD, BF16), ways=2),
        ("network", "compute"),
    ),
    "collective-matmul-unsharded": Known(SILENT, (), ("compute",)),
    "problem-1-1-shard-map": Known(SILENT, (), ("overhead",)),
    "problem-1-1-jit": Known(SILENT, (), ("overhead",)),
    "problem-1-2-shard-map": Known(SILENT, (), ("overhead",)),
    "problem-1-2-jit": Known(SILENT, (), ("overhead",)),
    "problem-2-1-local": Known(SILENT, (), ("memory",)),
    # Tokens f32[256, 1024] and their experts to all of X, the columns to all of Y; then the sums
    # f32[1024, 4096] of four devices' experts.
    "problem-2-3-allgather": Known(
        "sends 19 MiB a device: 2 all-gathers over X, 1 all-gather over Y, "
        "1 reduce-scatter over X.",
        (
            all_gather("X", 4, 256 * 1024 * 4),
            all_gather("X", 4, 256 * 4, INT),
            all_gather("Y", 2, 1024 * 1024 * 4),
            reduce_scatter("X", 4, 1024 * 4096 * 4),
        ),
    ),
    "problem-2-3-alltoall": Known(
        "sends at least 1.19 MiB a device: 2 all-to-alls over X, 1 all-gather over X, "
        "1 all-reduce over X, 1 all-gather over Y.",
        exchanged(1),
        ("network", "memory"),
        looped=3,
    ),
    "problem-2-4-top-k": Known(
        "sends at least 2.38 MiB a device: 2 all-to-alls over X, 1 all-gather over X, "
        "1 all-reduce over X, 1 all-gather over Y.",
        exchanged(2),
        ("network", "memory"),
        looped=3,
    ),
    "problem-3-1-naive": Known(
        "sends 12 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, PRODUCT, BF16),)
    ),
    # Four in the program, one after XLA.
    "problem-3-1-tiled": Known(
        "sends 12 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, PRODUCT, BF16),)
    ),
    # A quarter of the product goes round twice: as float32 sums, and as what they came to.
    "problem-3-1-ring": Known(
        "sends 18 MiB a device: 6 collective-permutes over Y.",
        rings((PRODUCT // 2, "float32"), (PRODUCT // 4, BF16), ways=1),
    ),
    "problem-3-2-jit": Known(
        "sends 3 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, NARROW, BF16),)
    ),
    "problem-3-2-psum-scatter": Known(
        "sends 1.5 MiB a device: 1 reduce-scatter over Y.",
        (reduce_scatter("Y", 4, NARROW, BF16),),
    ),
    "problem-3-2-ring": Known(
        "sends 3 MiB a device: 3 collective-permutes over Y.",
        rings((NARROW // 2, "float32"), ways=1),
    ),
    "problem-3-3-jit": Known(
        "sends 4.5 MiB a device: 1 all-gather over Y, 1 all-reduce over Y.",
        (all_gather("Y", 4, A_SHARD, BF16), all_reduce("Y", 4, NARROW, BF16)),
    ),
    "problem-3-3-rings": Known(
        "sends 4.5 MiB a device: 12 collective-permutes over Y.",
        rings((A_SHARD, BF16), (NARROW // 2, "float32"), ways=2),
    ),
    "problem-4-allreduce": Known(
        "sends 18 MiB a device: 12 collective-permutes over Y.",
        rings((PRODUCT // 2, "float32"), (PRODUCT // 4, BF16), ways=2),
    ),
    "problem-4-reducescatter": Known(
        "sends 3 MiB a device: 6 collective-permutes over Y.",
        rings((NARROW // 2, "float32"), ways=2),
    ),
}
XLA_CHOOSES = {"problem-2-2-jit"}
"""Where only the large part follows from the shapes."""


def chapter(name: str) -> Example:
    return find_example(f"chapter/{name}")


@cache
def program(name: str) -> Program:
    """Program once: JAX then traces it once, too."""
    return find_example(name).program()


def report_of(name: str) -> Communication:
    function, arguments = program(name)
    return communication(function, *arguments)


@cache
def estimate_of(name: str) -> Estimate:
    function, arguments = program(name)
    return estimate(function, *arguments, on=find_example(name).on)


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_chapter_example_sends_is_what_theory_says(name: str) -> None:
    known, report = KNOWN[name], report_of(f"chapter/{name}")
    assert report.sentence == f"{report.name} {known.sentence}"
    results = report.to_dict()["collectives"]
    assert told_counts(results) == expected_counts(known.sends)
    assert sum(collective["at_least"] for collective in results) == known.looped
    assert report.mesh == chapter(name).mesh


def test_jit_of_a_mixture_brings_every_expert_and_every_token_to_every_device() -> None:
    report = report_of("chapter/problem-2-2-jit")
    experts, tokens = 4 * 2048 * 4096 * 4, 1024 * 1024 * 4
    large = (all_gather("X", 4, experts), all_reduce("X", 4, tokens))
    counts = told_counts(report.to_dict()["collectives"])
    for expected in large:
        assert counts.pop(expected.key) == 1
    # The rest is about where tokens go.
    assert sum(sent * count for (_, _, _, sent), count in counts.items()) < MIB
    assert report.sentence.startswith(f"{report.name} sends at least 390 MiB a device: ")
    assert estimate_of("chapter/problem-2-2-jit").bound == "network"


@pytest.mark.parametrize("name", KNOWN)
def test_a_chapter_example_takes_time_on_its_slice_and_says_what_bounds_it(name: str) -> None:
    step_estimate = estimate_of(f"chapter/{name}")
    assert math.isfinite(step_estimate.seconds)
    assert 0 < step_estimate.seconds < 0.1
    first = str(step_estimate).splitlines()[0]
    assert f" on {chapter(name).on} " in first
    assert first.endswith(tuple(f"bound by {bound}" for bound in KNOWN[name].bound))


def test_a_ring_hides_its_hops_where_each_matmul_takes_longer() -> None:
    # On a core of a v2, whose peak is 23 TFLOP/s, each of four products takes 47 µs or more, and
    # 512 KiB go over a link in 9: the first hop runs beside the first product, and so on.
    function, arguments = program("chapter/collective-matmul-ring")
    step_estimate = estimate(function, *arguments, on="v2-8")
    assert step_estimate.exposed < 1e-6


def test_every_chapter_example_is_known() -> None:
    listed = {name.partition("/")[2] for name in examples() if name.startswith("chapter/")}
    assert listed == KNOWN.keys() | XLA_CHOOSES


# Our own models ---------------------------------------------------------------------------------

MODELS = [one for name, one in examples().items() if name.startswith("models/")]


def totals(report: Communication) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes that one device sends, by kind and axes."""
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in report.collectives:
        sums[collective.kind, collective.axes] += collective.total
    return sums


@pytest.mark.parametrize("one", MODELS, ids=lambda one: one.name)
def test_a_model_takes_shapes_that_lie_on_its_mesh(one: Example) -> None:
    _, arguments = program(one.name)
    leaves: list[Any] = jax.tree.leaves(arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    for leaf in leaves:
        assert isinstance(leaf.sharding, NamedSharding)
        assert isinstance(leaf.sharding.mesh, AbstractMesh)
        assert dict(leaf.sharding.mesh.shape) == one.mesh
    used = {axis for leaf in leaves for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    assert used == one.mesh.keys()


# The 350M decoder is the 1.3B one with other sizes; two of its layouts are compiled below.
@pytest.mark.parametrize("name", [one.name for one in MODELS if "350m" not in one.name])
def test_a_models_step_traces_and_gives_the_state_back_as_it_was(name: str) -> None:
    step, arguments = program(name)
    state, *_ = step.trace(*arguments).out_info  # type: ignore[attr-defined]
    before, after = jax.tree.leaves(arguments[0]), jax.tree.leaves(state)
    assert [(leaf.shape, leaf.dtype) for leaf in after] == [
        (leaf.shape, leaf.dtype) for leaf in before
    ]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("models/mlp-data", 784 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 10 + 10),
        ("models/lm-350m-data", 373_867_520),
    ],
)
def test_data_parallelism_only_sums_gradients(name: str, parameters: int) -> None:
    sums = totals(report_of(name))
    assert sums.keys() == {("all-reduce", ("data",))}
    # Beside them, a few numbers: the loss, its parts, whether to stop.
    beside = sums["all-reduce", ("data",)] - 2 * 7 * 4 * parameters // 8
    assert 0 <= beside < KIB


def test_fsdp_gathers_weights_and_scatters_their_gradients() -> None:
    report = report_of("models/lm-350m-fsdp")
    sums = totals(report)
    assert {axes for _, axes in sums} == {("data",)}
    # The attention's four weights and the feed-forward part's three, in 24 blocks; the table, whose
    # rows are looked up in float32; the head.
    blocks, outside = 24 * (4 * 1024**2 + 3 * 1024 * 2816), 32_000 * 1024
    # In bfloat16, forward and once more where the block is computed again.
    gathered = 2 * 2 * blocks + 2 * outside + 4 * outside
    assert sums["all-gather", ("data",)] == gathered * 7 // 8
    assert sums["reduce-scatter", ("data",)] == 4 * (blocks + 2 * outside) * 7 // 8
    # The norms are whole on each device.
    assert sums["all-reduce", ("data",)] < 2 * 7 / 8 * 4 * (2 * 24 + 1) * 1024 + KIB
    assert "338 all-gathers over data, 170 reduce-scatters over data" in report.sentence


def test_tensor_parallelism_sends_activations_round_rings() -> None:
    sums = totals(report_of("models/mlp-tensor"))
    assert {kind for kind, _ in sums} == {"collective-permute", "all-reduce"}
    # Of 512 rows on each of two rings of four, in float32: the input of the first layer and the
    # output of the second, forward; the gradient of the output back, and the input once more.
    rows = 128 * 4
    shards = 3 * rows * (784 + 512 + 512 + 784)
    assert sums["collective-permute", ("model",)] == shards
    assert ("collective-permute", ("data",)) not in sums


def test_fsdp_and_tensor_parallelism_keep_to_their_axes() -> None:
    sums = totals(report_of("models/lm-1b3-fsdp+tensor"))
    by_kind: dict[str, set[tuple[str, ...]]] = {}
    for kind, axes in sums:
        by_kind.setdefault(kind, set()).add(axes)
    assert by_kind["all-gather"] == by_kind["reduce-scatter"] == {("data",)}
    assert by_kind["collective-permute"] == by_kind["all-to-all"] == {("model",)}


def test_experts_on_devices_of_their_own_are_sent_their_tokens() -> None:
    report = report_of("models/lm-moe-expert")
    tokens = [one for one in report.collectives if one.kind == "all-to-all"]
    assert tokens
    assert {one.axes for one in tokens} == {("expert",)}
    # As many rounds as the router asks for.
    assert all(one.at_least for one in tokens)
    assert not [one for one in report.collectives if one.kind == "reduce-scatter"]


@pytest.mark.parametrize(
    ("name", "bound"), [("models/mlp-data", "network"), ("models/lm-350m-fsdp", "memory")]
)
def test_a_training_step_takes_time_on_its_slice(name: str, bound: str) -> None:
    step_estimate = estimate_of(name)
    assert math.isfinite(step_estimate.seconds)
    assert step_estimate.seconds > 0
    assert str(step_estimate).splitlines()[0].endswith(f"bound by {bound}")


def test_a_training_step_needs_room_for_its_gradients() -> None:
    # All of them are alive at once, beside the weights and moments, which are updated in place.
    step_estimate = estimate_of("models/mlp-data")
    assert step_estimate.memory.temporaries >= 4 * 1_333_770


# By name and by mesh ----------------------------------------------------------------------------


def test_examples_are_listed_with_one_line_each() -> None:
    for name, one in examples().items():
        assert one.name == name
        assert one.description
        assert "\n" not in one.description
        assert len(f"{name}  {one.description}") < 140
        assert one.on.rpartition("-")[2] == str(math.prod(one.mesh.values()))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("collective-matmul-jit", "chapter/collective-matmul-jit"),
        ("chapter/colective-matmul-ring", "chapter/collective-matmul-ring"),
        ("lm-1b3", "models/lm-1b3-data"),
    ],
)
def test_a_name_that_is_none_is_reported_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"there is no example '{typed}'; nearest: .*{meant}"):
        find_example(typed)


def test_a_name_like_no_other_is_reported_where_the_names_are() -> None:
    with pytest.raises(UserError, match="drumline inspect --list"):
        find_example("%%%")


def test_an_example_takes_another_mesh_of_the_same_axes() -> None:
    function, arguments = chapter("collective-matmul-jit").program("X=16,Y=16")
    report = communication(function, *arguments)
    assert report.devices == 256
    counts = told_counts(report.to_dict()["collectives"])
    assert counts == {all_gather("Y", 16, 64 * 128 * 2, BF16).key: 1}


def test_an_example_refuses_a_mesh_of_other_axes() -> None:
    with pytest.raises(UserError, match="written for the axes X, Y, and the mesh is data=8"):
        chapter("collective-matmul-jit").program({"data": 8})


def test_an_example_refuses_a_mesh_that_does_not_divide_it() -> None:
    with pytest.raises(UserError, match="models/mlp-fsdp does not fit data=3: "):
        find_example("models/mlp-fsdp").program("data=3")

"""The examples of `drumline inspect` send the expected communication.

The chapter's programs have the chapter's sizes. All figures here are derived from the shapes and
the ring algorithm, not taken from a report.
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
from tests.cases import rare, sampled
from tests.inspect.expected import (
    Expected,
    all_gather,
    all_reduce,
    all_to_all,
    expected_counts,
    permute,
    reduce_scatter,
    reported_counts,
)

KIB, MIB = 2**10, 2**20
BF16, INT = "bfloat16", "int32"

# Each device's share of the collective matmul on X=2,Y=4: A[512, 512], matmuls [512, 8192] before
# their sum, [512, 2048] if D or F is the result.
A_SHARD = 512 * 512 * 2
PRODUCT = 512 * 8192 * 2
NARROW_PRODUCT = 512 * 2048 * 2


@dataclass(frozen=True)
class ExpectedExample:
    """The properties of an example that are known in advance."""

    sentence: str
    """The text in the report after the function's name."""
    sends: tuple[Expected, ...] = ()
    bound: tuple[str, ...] = ("network",)
    """The bounds of its time on its own slice; several if they are close in theory."""
    loop_collectives: int = 0
    """The number of collectives in loops with a data-dependent length."""


def rings(*operands: tuple[int, str], streams: int) -> tuple[Expected, ...]:
    """Return three permutes around a ring of four, in one stream or in two of half the size."""
    return tuple(
        permute("Y", size // streams, dtype, count=3 * streams) for size, dtype in operands
    )


def expert_exchange(k: int) -> tuple[Expected, ...]:
    """Return the communication of experts in rounds, with k experts per token.

    Each of four peers gets a quarter of the balanced share: 256·k/4/4 = 16·k rows. These are sent
    with 1024 of 2048 columns, gathered over Y, and returned with 4096. Before that, devices
    exchange their token counts for each of 16 experts and the number of rounds.
    """
    sent_bytes, returned_bytes = 4 * 16 * k * 1024 * 4, 4 * 16 * k * 4096 * 4
    return (
        all_gather("X", 4, 16 * 4, INT),
        all_reduce("X", 4, 4, INT),
        all_to_all("X", 4, sent_bytes),
        all_gather("Y", 2, sent_bytes),
        all_to_all("X", 4, returned_bytes),
    )


SILENT = "does not communicate."
EXPECTED: dict[str, ExpectedExample] = {
    # bf16[4, 8192] on each device. 16 MiB of weights are read for four rows of A.
    "first-jit-matmul": ExpectedExample(
        "sends 64 KiB a device: 1 all-reduce over Y.",
        (all_reduce("Y", 2, 4 * 8192 * 2, BF16),),
        ("memory",),
    ),
    # bf16[256, 2048] on each device. At 256 rows a v5e computes about as long as it reads.
    "sharding-constraint": ExpectedExample(
        "sends 1 MiB a device: 1 all-reduce over Y.",
        (all_reduce("Y", 2, 256 * 2048 * 2, BF16),),
        ("network", "memory", "compute"),
    ),
    "no-sharding-constraint": ExpectedExample(SILENT, (), ("memory", "compute")),
    "slice-and-average": ExpectedExample(
        "sends 28 B a device: 1 all-reduce over x and y.", (all_reduce("xy", 8, 16, INT),)
    ),
    # Sending 1.5 MiB over a link of 45 GB/s takes 35 µs, the matmul 22 µs. A ring hides a part of
    # either.
    "collective-matmul-jit": ExpectedExample(
        "sends 1.5 MiB a device: 1 all-gather over Y.", (all_gather("Y", 4, A_SHARD, BF16),)
    ),
    "collective-matmul-ring": ExpectedExample(
        "sends 1.5 MiB a device: 3 collective-permutes over Y.",
        rings((A_SHARD, BF16), streams=1),
        ("network", "compute"),
    ),
    "collective-matmul-one-way": ExpectedExample(
        "sends 1.5 MiB a device: 3 collective-permutes over Y.",
        rings((A_SHARD, BF16), streams=1),
        ("network", "compute"),
    ),
    "collective-matmul-both-ways": ExpectedExample(
        "sends 1.5 MiB a device: 6 collective-permutes over Y.",
        rings((A_SHARD, BF16), streams=2),
        ("network", "compute"),
    ),
    "collective-matmul-unsharded": ExpectedExample(SILENT, (), ("compute",)),
    "problem-1-1-shard-map": ExpectedExample(SILENT, (), ("overhead",)),
    "problem-1-1-jit": ExpectedExample(SILENT, (), ("overhead",)),
    "problem-1-2-shard-map": ExpectedExample(SILENT, (), ("overhead",)),
    "problem-1-2-jit": ExpectedExample(SILENT, (), ("overhead",)),
    "problem-2-1-local": ExpectedExample(SILENT, (), ("memory",)),
    # Tokens f32[256, 1024] and their experts go to all of X, the columns to all of Y. Then the sums
    # f32[1024, 4096] of four devices' experts follow.
    "problem-2-3-allgather": ExpectedExample(
        "sends 19 MiB a device: 2 all-gathers over X, 1 all-gather over Y, "
        "1 reduce-scatter over X.",
        (
            all_gather("X", 4, 256 * 1024 * 4),
            all_gather("X", 4, 256 * 4, INT),
            all_gather("Y", 2, 1024 * 1024 * 4),
            reduce_scatter("X", 4, 1024 * 4096 * 4),
        ),
    ),
    "problem-2-3-alltoall": ExpectedExample(
        "sends at least 1.19 MiB a device: 2 all-to-alls over X, 1 all-gather over X, "
        "1 all-reduce over X, 1 all-gather over Y.",
        expert_exchange(1),
        ("network", "memory"),
        loop_collectives=3,
    ),
    "problem-2-4-top-k": ExpectedExample(
        "sends at least 2.38 MiB a device: 2 all-to-alls over X, 1 all-gather over X, "
        "1 all-reduce over X, 1 all-gather over Y.",
        expert_exchange(2),
        ("network", "memory"),
        loop_collectives=3,
    ),
    "problem-3-1-naive": ExpectedExample(
        "sends 12 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, PRODUCT, BF16),)
    ),
    # The program has four, and XLA merges them into one.
    "problem-3-1-tiled": ExpectedExample(
        "sends 12 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, PRODUCT, BF16),)
    ),
    # A quarter of the product travels the ring twice: as float32 sums, and as their result.
    "problem-3-1-ring": ExpectedExample(
        "sends 18 MiB a device: 6 collective-permutes over Y.",
        rings((PRODUCT // 2, "float32"), (PRODUCT // 4, BF16), streams=1),
    ),
    "problem-3-2-jit": ExpectedExample(
        "sends 3 MiB a device: 1 all-reduce over Y.", (all_reduce("Y", 4, NARROW_PRODUCT, BF16),)
    ),
    "problem-3-2-psum-scatter": ExpectedExample(
        "sends 1.5 MiB a device: 1 reduce-scatter over Y.",
        (reduce_scatter("Y", 4, NARROW_PRODUCT, BF16),),
    ),
    "problem-3-2-ring": ExpectedExample(
        "sends 3 MiB a device: 3 collective-permutes over Y.",
        rings((NARROW_PRODUCT // 2, "float32"), streams=1),
    ),
    "problem-3-3-jit": ExpectedExample(
        "sends 4.5 MiB a device: 1 all-gather over Y, 1 all-reduce over Y.",
        (all_gather("Y", 4, A_SHARD, BF16), all_reduce("Y", 4, NARROW_PRODUCT, BF16)),
    ),
    "problem-3-3-rings": ExpectedExample(
        "sends 4.5 MiB a device: 12 collective-permutes over Y.",
        rings((A_SHARD, BF16), (NARROW_PRODUCT // 2, "float32"), streams=2),
    ),
    "problem-4-allreduce": ExpectedExample(
        "sends 18 MiB a device: 12 collective-permutes over Y.",
        rings((PRODUCT // 2, "float32"), (PRODUCT // 4, BF16), streams=2),
    ),
    "problem-4-reducescatter": ExpectedExample(
        "sends 3 MiB a device: 6 collective-permutes over Y.",
        rings((NARROW_PRODUCT // 2, "float32"), streams=2),
    ),
}
XLA_CHOOSES = {"problem-2-2-jit"}
"""The examples with only the large part determined by the shapes."""


def chapter(name: str) -> Example:
    return find_example(f"chapter/{name}")


@cache
def traced_program(name: str) -> Program:
    """Return the program, cached so that JAX traces it once."""
    return find_example(name).program()


def report_of(name: str) -> Communication:
    function, arguments = traced_program(name)
    return communication(function, *arguments)


@cache
def estimate_of(name: str) -> Estimate:
    function, arguments = traced_program(name)
    return estimate(function, *arguments, on=find_example(name).on)


@pytest.mark.every_case
@pytest.mark.parametrize("name", EXPECTED)
def test_a_chapter_example_sends_the_expected_collectives(name: str) -> None:
    expected_example, report = EXPECTED[name], report_of(f"chapter/{name}")
    assert report.sentence == f"{report.name} {expected_example.sentence}"
    results = report.to_dict()["collectives"]
    assert reported_counts(results) == expected_counts(expected_example.sends)
    assert (
        sum(collective["at_least"] for collective in results) == expected_example.loop_collectives
    )
    assert report.mesh == chapter(name).mesh


def test_jit_of_a_mixture_replicates_every_expert_and_every_token() -> None:
    report = report_of("chapter/problem-2-2-jit")
    experts, tokens = 4 * 2048 * 4096 * 4, 1024 * 1024 * 4
    large = (all_gather("X", 4, experts), all_reduce("X", 4, tokens))
    counts = reported_counts(report.to_dict()["collectives"])
    for expected in large:
        assert counts.pop(expected.key) == 1
    # The rest is about the routing of tokens.
    assert sum(sent * count for (_, _, _, sent), count in counts.items()) < MIB
    assert report.sentence.startswith(f"{report.name} sends at least 390 MiB a device: ")
    assert estimate_of("chapter/problem-2-2-jit").bound == "network"


@pytest.mark.parametrize("name", sampled(EXPECTED, [*EXPECTED][::2]))
def test_a_chapter_example_has_a_time_and_a_bound_on_its_slice(name: str) -> None:
    step_estimate = estimate_of(f"chapter/{name}")
    assert math.isfinite(step_estimate.seconds)
    assert 0 < step_estimate.seconds < 0.1
    first = str(step_estimate).splitlines()[0]
    assert f" on {chapter(name).on} " in first
    assert first.endswith(tuple(f"bound by {bound}" for bound in EXPECTED[name].bound))


def test_a_ring_hides_its_permutes_if_each_matmul_takes_longer() -> None:
    # On a core of a v2, with a peak of 23 TFLOP/s, each of four matmuls takes 47 µs or more, and
    # 512 KiB take 9 µs over a link. So each permute overlaps with a matmul.
    function, arguments = traced_program("chapter/collective-matmul-ring")
    step_estimate = estimate(function, *arguments, on="v2-8")
    assert step_estimate.exposed < 1e-6


def test_every_chapter_example_is_known() -> None:
    listed = {name.partition("/")[2] for name in examples() if name.startswith("chapter/")}
    assert listed == EXPECTED.keys() | XLA_CHOOSES


# Drumline's models --------------------------------------------------------------------------------

MODELS = [example for name, example in examples().items() if name.startswith("models/")]


def totals(report: Communication) -> Counter[tuple[str, tuple[str, ...]]]:
    """Return the bytes that one device sends, by kind and axes."""
    sent_totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in report.collectives:
        sent_totals[collective.kind, collective.axes] += collective.total
    return sent_totals


@pytest.mark.parametrize("example", MODELS, ids=lambda example: example.name)
def test_a_model_takes_shapes_that_lie_on_its_mesh(example: Example) -> None:
    _, arguments = traced_program(example.name)
    leaves: list[Any] = jax.tree.leaves(arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    for leaf in leaves:
        assert isinstance(leaf.sharding, NamedSharding)
        assert isinstance(leaf.sharding.mesh, AbstractMesh)
        assert dict(leaf.sharding.mesh.shape) == example.mesh
    used = {axis for leaf in leaves for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    assert used == example.mesh.keys()


# The 350M decoder is the 1.3B one with other sizes. Two of its layouts are compiled below.
@pytest.mark.parametrize(
    "name",
    sampled(
        [example.name for example in MODELS if "350m" not in example.name],
        ["models/mlp-data", "models/vit-b16-fsdp"],
    ),
)
def test_a_models_step_returns_a_state_of_the_same_shapes(name: str) -> None:
    step, arguments = traced_program(name)
    state, *_ = step.trace(*arguments).out_info  # type: ignore[attr-defined]
    before, after = jax.tree.leaves(arguments[0]), jax.tree.leaves(state)
    assert [(leaf.shape, leaf.dtype) for leaf in after] == [
        (leaf.shape, leaf.dtype) for leaf in before
    ]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("models/mlp-data", 784 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 10 + 10),
        *rare(("models/lm-350m-data", 373_867_520)),
    ],
)
def test_data_parallelism_only_sums_gradients(name: str, parameters: int) -> None:
    sent_totals = totals(report_of(name))
    assert sent_totals.keys() == {("all-reduce", ("data",))}
    # Besides the gradients there are a few numbers: the loss, its parts, and the stop flag.
    other_bytes = sent_totals["all-reduce", ("data",)] - 2 * 7 * 4 * parameters // 8
    assert 0 <= other_bytes < KIB


def test_fsdp_gathers_weights_and_scatters_their_gradients() -> None:
    report = report_of("models/lm-350m-fsdp")
    sent_totals = totals(report)
    assert {axes for _, axes in sent_totals} == {("data",)}
    # The attention's four weights and the feed-forward part's three, in 24 blocks; the table, with
    # rows looked up in float32; the head.
    blocks, table_and_head = 24 * (4 * 1024**2 + 3 * 1024 * 2816), 32_000 * 1024
    # In bfloat16, forward and again in the recomputed block.
    gathered = 2 * 2 * blocks + 2 * table_and_head + 4 * table_and_head
    assert sent_totals["all-gather", ("data",)] == gathered * 7 // 8
    assert sent_totals["reduce-scatter", ("data",)] == 4 * (blocks + 2 * table_and_head) * 7 // 8
    # The norms are replicated.
    assert sent_totals["all-reduce", ("data",)] < 2 * 7 / 8 * 4 * (2 * 24 + 1) * 1024 + KIB
    assert "338 all-gathers over data, 170 reduce-scatters over data" in report.sentence


def test_tensor_parallelism_sends_activations_round_rings() -> None:
    sent_totals = totals(report_of("models/mlp-tensor"))
    assert {kind for kind, _ in sent_totals} == {"collective-permute", "all-reduce"}
    # Each of two rings of four has 512 rows in float32: the input of the first layer and the output
    # of the second forward, the gradient of the output backward, and the input once more.
    rows = 128 * 4
    shards = 3 * rows * (784 + 512 + 512 + 784)
    assert sent_totals["collective-permute", ("model",)] == shards
    assert ("collective-permute", ("data",)) not in sent_totals


@pytest.mark.every_case
def test_fsdp_and_tensor_parallelism_keep_to_their_axes() -> None:
    sent_totals = totals(report_of("models/lm-1b3-fsdp+tensor"))
    by_kind: dict[str, set[tuple[str, ...]]] = {}
    for kind, axes in sent_totals:
        by_kind.setdefault(kind, set()).add(axes)
    assert by_kind["all-gather"] == by_kind["reduce-scatter"] == {("data",)}
    assert by_kind["collective-permute"] == by_kind["all-to-all"] == {("model",)}


@pytest.mark.every_case
def test_expert_parallelism_sends_tokens_to_the_experts_devices() -> None:
    report = report_of("models/lm-moe-expert")
    tokens = [collective for collective in report.collectives if collective.kind == "all-to-all"]
    assert tokens
    assert {collective.axes for collective in tokens} == {("expert",)}
    # The router determines the number of rounds.
    assert all(collective.at_least for collective in tokens)
    assert not [
        collective for collective in report.collectives if collective.kind == "reduce-scatter"
    ]


@pytest.mark.parametrize(
    ("name", "bound"), [("models/mlp-data", "network"), ("models/lm-350m-fsdp", "memory")]
)
def test_a_training_step_takes_time_on_its_slice(name: str, bound: str) -> None:
    step_estimate = estimate_of(name)
    assert math.isfinite(step_estimate.seconds)
    assert step_estimate.seconds > 0
    assert str(step_estimate).splitlines()[0].endswith(f"bound by {bound}")


def test_a_training_step_needs_memory_for_its_gradients() -> None:
    # All gradients are alive at once, in addition to the weights and moments, which are updated in
    # place.
    step_estimate = estimate_of("models/mlp-data")
    assert step_estimate.memory.temporaries >= 4 * 1_333_770


# Names and meshes ------------------------------------------------------------------------------


def test_examples_are_listed_with_one_line_each() -> None:
    for name, example in examples().items():
        assert example.name == name
        assert example.description
        assert "\n" not in example.description
        assert len(f"{name}  {example.description}") < 140
        assert example.on.rpartition("-")[2] == str(math.prod(example.mesh.values()))


@pytest.mark.parametrize(
    ("name_typed", "nearest"),
    [
        ("collective-matmul-jit", "chapter/collective-matmul-jit"),
        ("chapter/colective-matmul-ring", "chapter/collective-matmul-ring"),
        ("lm-1b3", "models/lm-1b3-data"),
    ],
)
def test_an_unknown_name_is_reported_with_the_nearest(name_typed: str, nearest: str) -> None:
    with pytest.raises(
        UserError, match=f"there is no example '{name_typed}'; nearest: .*{nearest}"
    ):
        find_example(name_typed)


def test_the_error_for_an_unrecognizable_name_points_to_the_list() -> None:
    with pytest.raises(UserError, match="drumline inspect --list"):
        find_example("%%%")


def test_an_example_takes_another_mesh_of_the_same_axes() -> None:
    function, arguments = chapter("collective-matmul-jit").program("X=16,Y=16")
    report = communication(function, *arguments)
    assert report.devices == 256
    counts = reported_counts(report.to_dict()["collectives"])
    assert counts == {all_gather("Y", 16, 64 * 128 * 2, BF16).key: 1}


def test_an_example_rejects_a_mesh_of_other_axes() -> None:
    with pytest.raises(UserError, match="written for the axes X, Y, and the mesh is data=8"):
        chapter("collective-matmul-jit").program({"data": 8})


def test_an_example_rejects_a_mesh_that_does_not_divide_it() -> None:
    with pytest.raises(UserError, match="models/mlp-fsdp does not fit data=3: "):
        find_example("models/mlp-fsdp").program("data=3")

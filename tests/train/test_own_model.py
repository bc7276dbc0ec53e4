"""The user's own models: valid and invalid losses and evaluation functions."""

# mypy: allow-untyped-calls

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.models import LM
from drumline.parallel.target import trace_for
from drumline.train import Evaluation, Functions, Recipe, data, fit
from drumline.train.mesh import make_mesh
from drumline.train.plan import make_plan
from drumline.train.steps.evaluation import Evaluator
from drumline.train.steps.step import compiler_options
from tests.models.training import KEY, MODELS, batch_for, weights_of
from tests.train.toy import ROWS, init, toy


def predictions(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["body"]) @ params["head"]


def loss_without_metrics(params: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return jnp.mean((predictions(params, batch) - batch["y"]) ** 2)


def toy_with_loss(loss: Any, steps: int = 2, **changes: Any) -> Recipe:
    """Return the toy with another loss on one device, which compiles quickly."""
    return replace(toy(steps, mesh=1), model=Functions(init, loss), **changes)


def test_a_loss_without_metrics_trains_and_is_evaluated() -> None:
    result = fit(
        toy_with_loss(loss_without_metrics, evaluation=Evaluation(data.arrays(ROWS, batch=16)))
    )
    assert result.metrics["loss"] > 0
    assert result.metrics["eval_loss"] > 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda params, batch: loss_without_metrics(params, batch, None),
            "loss: it takes (params, batch) but is called with (params, batch, key)",
        ),
        (
            lambda params, batch, _: predictions(params, batch),
            "loss: it has shape (16,); return one number",
        ),
        (
            lambda params, batch, key: (
                loss_without_metrics(params, batch, key),
                predictions(params, batch),
            ),
            "loss: it returns neither the loss alone nor (loss, metrics)",
        ),
        (
            lambda params, batch, key: (
                loss_without_metrics(params, batch, key),
                {"all": batch["y"]},
            ),
            "loss: metric 'all' is not one number",
        ),
        (
            lambda params, batch, _: jnp.argmax(predictions(params, batch)),
            "loss: it is not a floating-point number",
        ),
        (lambda *_: None, "loss: it is not a floating-point number"),
    ],
)
def test_an_invalid_loss_is_rejected_with_a_message(loss: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        fit(toy_with_loss(loss))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


# Evaluation ---------------------------------------------------------------------------------------


def with_dropout(params: Any, batch: Any, key: Any) -> jax.Array:
    x = batch["x"]
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
    return loss_without_metrics(params, {**batch, "x": x}, None)


def test_an_evaluation_has_no_dropout() -> None:
    result = fit(toy_with_loss(with_dropout, evaluation=Evaluation(data.arrays(ROWS, batch=16))))
    all_rows = {name: jnp.asarray(column) for name, column in ROWS.items()}
    expected = float(loss_without_metrics(jax.device_get(result.state.params), all_rows, None))
    assert result.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_needs_its_key_is_rejected_before_the_first_step() -> None:
    def loss_with_dropout(params: Any, batch: Any, key: Any) -> jax.Array:
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return loss_without_metrics(params, {**batch, "x": jnp.where(mask, batch["x"], 0)}, None)

    with pytest.raises(UserError) as raised:
        fit(toy_with_loss(loss_with_dropout, evaluation=Evaluation(data.arrays(ROWS, batch=16))))
    assert str(raised.value) == (
        "evaluation: the model's loss uses its key, and an evaluation has key=None; leave "
        "out dropout and noise there, or give Evaluation a function"
    )
    assert fit(toy_with_loss(loss_with_dropout)).step == 2


def evaluate_toy(batch: int, **function: Any) -> dict[str, float]:
    """Return the metrics of the toy's 203 rows, in batches of this size, on one device."""
    source = data.arrays(ROWS, batch=batch)
    recipe = toy_with_loss(loss_without_metrics, 1, evaluation=Evaluation(source, **function))
    return fit(recipe).metrics


def all_kinds_of_metrics(params: Any, batch: Any) -> dict[str, Any]:
    error = jnp.abs(predictions(params, batch) - batch["y"])
    is_large = error > 2.0
    return {
        "mean": error.mean(),
        "by_row": error,
        "of_the_far": (jnp.where(is_large, error, 0).sum(), is_large.sum()),
        "largest": error.max(),
    }


def test_evaluation_metrics_do_not_depend_on_the_batch_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small, large = (
        evaluate_toy(7, function=all_kinds_of_metrics),
        evaluate_toy(203, function=all_kinds_of_metrics),
    )
    output = capsys.readouterr().out
    for name in ("eval_mean", "eval_by_row", "eval_of_the_far"):
        assert small[name] == pytest.approx(large[name], rel=1e-5), name
    assert small["eval_mean"] == pytest.approx(small["eval_by_row"], rel=1e-6)
    # A metric that depends on the batch size causes one message, and only with several batches.
    message = (
        "evaluation: largest is not a mean over rows, so it depends on the batch of 7; return one "
    )
    assert output.count(message) == 1
    assert output.count("is not a mean over rows") == 1


@pytest.mark.parametrize("name", MODELS)
def test_ignored_targets_do_not_count_in_an_evaluation_whatever_the_batch(name: str) -> None:
    """The records have very different numbers of targets that count, and some have none."""
    model = MODELS[name]
    records = batch_for(model, 10)
    if isinstance(model, LM):
        rng, targets = np.random.default_rng(3), records["tokens"][:, 1:].copy()
        # Most of the ignored targets are at the end, so that the batches differ.
        targets[rng.random(targets.shape) < np.linspace(0, 1.1, 10)[:, None]] = model.ignore_index
        records["targets"] = targets
    else:
        records["label"][[1, 6, 7, 9]] = model.ignore_index
    params = weights_of(name)
    loss, metrics = jax.jit(model.loss)(params, records, KEY)
    expected = float(metrics.get("cross_entropy", loss))

    def evaluate(batch: int, devices: int = 1) -> dict[str, float]:
        evaluation = Evaluation(data.arrays(records, batch=batch))
        sgd = optax.sgd(0.1)
        sizes = {"data": devices}
        recipe = Recipe(model, sgd, evaluation.data, sizes, steps=1, evaluation=evaluation)
        mesh = make_mesh(sizes)
        with jax.set_mesh(mesh):
            plan = make_plan(recipe, mesh)
            shapes, messages = plan.abstract_state.params, list[str]()
            metrics = Evaluator(evaluation, model, mesh, shapes, plan.loss, messages.append)(params)
        assert not messages
        return metrics

    for case in ((2,), (3,), (4,), (10,), (6, 2), (8, 8)):
        metrics = evaluate(*case)
        assert metrics["eval_loss"] == pytest.approx(expected, rel=2e-6), case
        assert metrics == pytest.approx(evaluate(10), rel=2e-6), case


def test_a_recipe_may_have_several_evaluations_by_name() -> None:
    def evaluation_of(rows: slice) -> Evaluation:
        part = {name: column[rows] for name, column in ROWS.items()}
        return Evaluation(data.arrays(part, batch=7), lambda _, batch: {"y": batch["y"]})

    evaluations = {"near": evaluation_of(slice(0, 50)), "far": evaluation_of(slice(50, 203))}
    recipe = toy_with_loss(loss_without_metrics, 1, evaluations=evaluations)
    metrics = fit(recipe).metrics
    assert metrics["eval_near_y"] == pytest.approx(ROWS["y"][:50].mean(), rel=1e-5)
    assert metrics["eval_far_y"] == pytest.approx(ROWS["y"][50:].mean(), rel=1e-5)
    both = fit(replace(recipe, evaluation=Evaluation(data.arrays(ROWS, batch=7)))).metrics
    assert both.keys() - metrics.keys() == {"eval_loss"}


def test_a_model_may_have_its_own_evaluation_function() -> None:
    model = Functions(
        init, loss_without_metrics, evaluate=lambda _, batch: {"one": batch["y"] * 0 + 1}
    )
    recipe_made = replace(
        toy(1, mesh=1), model=model, evaluation=Evaluation(data.arrays(ROWS, batch=16))
    )
    assert fit(recipe_made).metrics["eval_one"] == 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _, batch: batch["y"].mean(), "the function must return a dict"),
        (lambda _, batch: {"x": batch["x"]}, "x has shape (7, 16); return one number"),
        (lambda _, batch: {"x": (batch["y"], 3.0)}, "x is not a pair of two numbers"),
    ],
)
def test_invalid_evaluation_metrics_are_rejected_with_a_message(
    function: Any, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        evaluate_toy(7, function=function)
    assert message in str(raised.value)


# Compiler options ---------------------------------------------------------------------------------

FAST_MATH = "xla_cpu_enable_fast_math"
CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}
OWN = Functions(init, loss_without_metrics)


def test_fit_prints_the_compiler_options_that_it_passes_and_their_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy_with_loss(loss_without_metrics)
    fit(recipe, checkpoint=tmp_path)
    assert "compiler options" not in capsys.readouterr().out
    options = {FAST_MATH: False, "xla_backend_optimization_level": 1, "xla_absent": None}
    fit(replace(recipe, steps=4, compiler_options=options), checkpoint=tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "compiler options" in line]
    text = f"compiler options: {FAST_MATH}=False, xla_backend_optimization_level=1"
    assert lines == [
        text,
        f"changes since that checkpoint: steps 2 → 4; compiler options {{}} → {options}",
    ]


@pytest.mark.parametrize(("name", "value"), [("xla_absent", True), (FAST_MATH, "perhaps")])
def test_an_invalid_compiler_option_is_rejected_with_a_message(name: str, value: Any) -> None:
    recipe = replace(toy_with_loss(loss_without_metrics), compiler_options={name: value})
    with pytest.raises(UserError, match=f"^compiler_options: .*{name}") as raised:
        fit(recipe)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (MODELS["LM"], {}, CUBLAS_ONLY),
        (MODELS["MLP"], {}, CUBLAS_ONLY),
        (MODELS["LM"], {"xla_gpu_enable_triton_gemm": True}, {"xla_gpu_enable_triton_gemm": True}),
        (MODELS["LM"], {"xla_gpu_enable_triton_gemm": None}, {}),
        (MODELS["LM"], {"xla_more": 2}, {**CUBLAS_ONLY, "xla_more": 2}),
        (OWN, {}, {}),
        (OWN, {"xla_more": 2}, {"xla_more": 2}),
        (OWN, {"xla_gpu_enable_triton_gemm": None}, {}),
    ],
)
def test_only_the_models_of_drumline_have_default_options_and_only_on_gpus(
    model: Any, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    recipe = replace(toy_with_loss(loss_without_metrics), model=model, compiler_options=changes)
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    assert compiler_options(recipe, mesh) == expected
    mesh.devices[0].platform = "cpu"
    added = {name: value for name, value in changes.items() if value is not None}
    assert compiler_options(recipe, mesh) == added


def test_only_losses_with_permutes_have_the_options_that_overlap_them_on_a_tpu() -> None:
    mesh = make_mesh({"data": 2})

    def shifted_loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        shift = partial(jax.lax.ppermute, axis_name="data", perm=[(0, 1), (1, 0)])
        x = jax.shard_map(shift, in_specs=P("data"), out_specs=P("data"))(batch["x"])
        return loss_without_metrics(params, {**batch, "x": x}, None)

    def options(loss: Any, **changes: Any) -> dict[str, Any]:
        recipe = replace(toy(), model=Functions(init, loss), compiler_options=changes)
        with jax.set_mesh(mesh), trace_for("tpu", "TPU v4"):
            return dict(make_plan(recipe, mesh).compiler_options)

    (name,) = options(shifted_loss)
    assert name == "xla_lhs_output_fusion_latency_multiplier"
    assert options(loss_without_metrics) == options(shifted_loss, **{name: None}) == {}
    assert options(shifted_loss, **{name: 0.5}) == {name: 0.5}

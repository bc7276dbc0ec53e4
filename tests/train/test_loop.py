"""The loop with models of other libraries, and invalid recipes."""

# mypy: allow-untyped-calls

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.parallel import einsum, explain_einsum
from drumline.train import Functions, Recipe, Settings, data, fit, load_params
from drumline.train.checkpoints.files import COMMITTED
from drumline.train.mesh import make_mesh
from drumline.train.state import abstract_state
from tests.cases import rare
from tests.train.toy import ROWS, SHARDED, Slow, toy


def test_an_equinox_model_trains_and_resumes(tmp_path: Path) -> None:
    model_structure = eqx.nn.MLP(16, "scalar", 8, 1, key=jax.random.key(0))
    _, static = eqx.partition(model_structure, eqx.is_array)

    def init(key: jax.Array) -> Any:
        return eqx.filter(eqx.nn.MLP(16, "scalar", 8, 1, key=key), eqx.is_array)

    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        model = eqx.combine(params, static)
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2), {}

    def recipe(steps: int) -> Recipe:
        source = data.arrays(ROWS, batch=16)
        model = Functions(init, loss)
        return Recipe(model, optax.sgd(0.05), source, {"data": 2}, steps)

    first = fit(recipe(3), checkpoint=tmp_path)
    result = fit(recipe(40), checkpoint=tmp_path)
    assert result.metrics["loss"] < first.metrics["loss"] / 2
    assert isinstance(result.state.params, eqx.nn.MLP)
    assert result.state.params.layers[0].weight.shape == (8, 16)


def test_a_parameter_of_a_weak_type_trains_like_a_restored_one(tmp_path: Path) -> None:
    types: list[Any] = []

    def init(key: jax.Array) -> Any:
        del key
        return {"head": jnp.full(16, 0.3)}

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        types.append(jax.typeof(params["head"]))
        return jnp.mean((batch["x"].astype(jnp.bfloat16) @ params["head"] - batch["y"]) ** 2)

    assert jax.eval_shape(init, jax.random.key(0))["head"].weak_type
    fit(toy(3, model=Functions(init, loss)), checkpoint=tmp_path)
    # The loss is traced once to check it, and once for the step.
    assert len(types) == 2
    fit(toy(4, model=Functions(init, loss)), checkpoint=tmp_path)
    assert len(set(types)) == 1


def test_einsum_uses_its_ring_in_the_training_loop(tmp_path: Path) -> None:
    choices: list[str] = []

    def recipe(multiply: Any) -> Recipe:
        def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            del key
            hidden = jnp.tanh(multiply(batch["x"], params["w"]))
            return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2), {}

        def init(key: jax.Array) -> Any:
            return {"w": jax.random.normal(key, (16, 32)) / 4, "v": jnp.ones(32) / 32}

        def specs() -> Any:
            return {"w": P(None, "model"), "v": P()}

        model, source = Functions(init, loss, specs), data.arrays(ROWS, batch=16)
        return Recipe(model, optax.sgd(0.05), source, {"data": 2, "model": 2}, 3)

    def on_ring(x: jax.Array, w: jax.Array) -> jax.Array:
        shardings: Any = {
            "x_sharding": P(("data", "model"), None),
            "w_sharding": P(None, "model"),
            "out_sharding": P("data", "model"),
        }
        choices.append(explain_einsum("bd,df->bf", x, w, **shardings).choice)
        return einsum("bd,df->bf", x, w, **shardings)

    on_ring_result = fit(recipe(on_ring), checkpoint=tmp_path / "ring")
    plain_result = fit(recipe(jnp.matmul), checkpoint=tmp_path / "plain")
    assert set(choices) == {"gather-matmul"}
    assert on_ring_result.metrics["loss"] == pytest.approx(plain_result.metrics["loss"], rel=1e-5)


class Breaking(Slow):
    """Records that cannot be read from some batch on."""

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        if self.seconds > 0 and 100 in numbers:
            raise KeyError("record 100")
        return super().rows(numbers)


def test_an_exception_is_raised_unchanged_and_the_last_checkpoint_is_complete(
    tmp_path: Path,
) -> None:
    source = data.Data(Breaking(0.001), batch=16, shuffle=False)
    with pytest.raises(KeyError, match="record 100"):
        fit(replace(toy(40, save_every=6), data=source), checkpoint=tmp_path)
    assert (tmp_path / "6" / COMMITTED).exists()


@pytest.mark.parametrize("folder", ["~/toy", *rare("runs/toy"), Path("runs/toy")])
def test_a_relative_folder_saves_and_resumes(
    folder: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "runs"))
    fit(toy(4, save_every=2), checkpoint=folder)
    assert (tmp_path / "runs" / "toy" / "4" / COMMITTED).exists()
    assert fit(toy(6, save_every=2), checkpoint=folder).step == 6
    history = json.loads((tmp_path / "runs" / "toy" / "attempts.json").read_text())
    assert history["attempt"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"data": 16}}, "mesh: data=16 needs 16 devices and there are 8"),
        ({"mesh": {"data": -1, "model": -1}}, "only one axis can be -1"),
        ({"mesh": {"data": -1, "model": 3}}, "8 devices are not divisible by 3"),
        ({"mesh": {"data": 0}}, "the size of an axis is 1 or more, or -1"),
        ({"mesh": {"rows": 8}}, "specs: body is sharded over axis 'data', but the mesh has rows"),
        (
            {"mesh": {"rows": 8}, "model": Functions(SHARDED.init, SHARDED.loss)},
            "mesh: the batch is sharded over axis 'data', but the mesh has rows",
        ),
        ({"data": data.arrays(ROWS, batch=12)}, "a batch of 12 rows is not divisible by 8"),
        (
            {"model": replace(SHARDED, specs=lambda: {"body": P(None, None, "data"), "head": P()})},
            "specs: body has shape (16, 8), but",
        ),
        (
            {"mesh": {"data": 3}, "data": data.arrays(ROWS, batch=12)},
            "specs: dimension 0 of body (16, 8) is not divisible by 3 devices",
        ),
        (
            {"model": replace(SHARDED, specs=lambda: {"body": P()})},
            "specs: the tree does not match the parameters",
        ),
    ],
)
def test_an_invalid_sharding_is_rejected_with_a_message(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        fit(replace(toy(mesh=8), **change))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_invalid_folder_is_rejected_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint: .*file cannot be used: "):
        fit(toy(), checkpoint=tmp_path / "file")
    with pytest.raises(UserError, match="checkpoint: the path is empty"):
        fit(toy(), checkpoint="")
    with pytest.raises(UserError, match="steps: 0 is too few"):
        toy(0)
    with pytest.raises(UserError, match="use stop, skip or rollback"):
        Settings(nan="ignore")  # type: ignore[arg-type]


def test_the_optimizer_state_is_sharded_like_the_parameters() -> None:
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adafactor(1e-3), optax.adamw(1e-3)
    )
    recipe_made = replace(toy(), optimizer=optimizer)
    abstract = abstract_state(recipe_made, make_mesh(recipe_made.mesh))
    sharded = abstract.params["body"].sharding
    assert not sharded.is_fully_replicated
    adam = abstract.opt_state[2][0]
    assert adam.mu["body"].sharding == adam.nu["body"].sharding == sharded
    assert adam.count.sharding.is_fully_replicated
    # The factors of adafactor have the parameter's name but not its shape.
    factored = [
        leaf for leaf in jax.tree.leaves(abstract.opt_state) if leaf.shape not in {(16, 8), (8,)}
    ]
    assert all(leaf.sharding.is_fully_replicated for leaf in factored)
    assert len(factored) > 3


def test_parameters_that_are_a_single_array_are_sharded_and_resume(tmp_path: Path) -> None:
    """The shape is that of the run's key, which is still on every device."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        return jnp.mean((batch["x"][:, :2] @ params - batch["y"]) ** 2)

    model = Functions(lambda key: jax.random.normal(key, (2,)), loss, specs=lambda: P("data"))
    result = fit(toy(4, model=model), checkpoint=tmp_path)
    adam = result.state.opt_state[0]
    for array in (result.state.params, adam.mu, adam.nu):
        assert array.sharding.spec == P("data")
        assert array.addressable_shards[0].data.shape == (1,)
    assert adam.count.sharding.is_fully_replicated
    assert result.state.key.sharding.is_fully_replicated
    resumed = fit(toy(8, model=model), checkpoint=tmp_path).state.params
    assert resumed.sharding.spec == P("data")
    np.testing.assert_array_equal(resumed, fit(toy(8, model=model)).state.params)
    with pytest.raises(UserError, match=r"specs: params has shape \(2,\), but"):
        fit(toy(model=replace(model, specs=lambda: P(None, "data"))))


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_run_starts_from_pretrained_parameters(on_mesh: bool, tmp_path: Path) -> None:
    pretrained = fit(toy(3), checkpoint=tmp_path / "pretrained").state.params
    shapes = abstract_state(toy(), make_mesh({"data": 2})).params

    def init_from(mesh: Any) -> Any:
        assert mesh.shape == {"data": 2}
        return load_params(tmp_path / "pretrained", like=shapes if on_mesh else None)

    recipe = toy(2, save_every=1)
    recipe = replace(recipe, init_from=init_from, optimizer=optax.sgd(0.0, momentum=0.9))
    result = fit(recipe, checkpoint=tmp_path / "tuned")
    jax.tree.map(np.testing.assert_array_equal, result.state.params, pretrained)
    assert result.state.params["body"].sharding == pretrained["body"].sharding
    resumed = fit(replace(recipe, steps=4), checkpoint=tmp_path / "tuned")
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, pretrained)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"body": np.zeros((16, 8)), "head": np.zeros(7)},
            r"head is \(7,\), but the model has \(8,\)",
        ),
        ({"body": np.zeros((16, 8))}, "the parameters do not fit the model: "),
    ],
)
def test_pretrained_parameters_that_do_not_fit_are_rejected(params: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"init_from: {message}") as raised:
        fit(replace(toy(), init_from=lambda _: params))
    assert "\n" not in str(raised.value)

"""Published training steps on TPUs, as programs that compile without TPUs.

`rows` has the settings and the printed figures of each recipe, `models` the sizes of its model, and
`decoder` one training step in plain JAX for all of them. A program beside this package uses it so:

    from published import decoder, rows

    row = rows.ROWS["llama3.1-8b v6e-8"]
    fn, args = decoder.step(row.training, row.abstract_mesh())
    jax.jit(fn, donate_argnums=0).trace(*args).lower(lowering_platforms=("cpu",))
"""

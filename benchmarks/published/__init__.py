"""Training steps whose seconds on TPUs others published, as programs one can compile without them.

`rows` holds what each recipe states and what it printed, `models` the sizes of its model,
`decoder` one training step in plain JAX that stands for all of them. From a program beside this
package:

    from published import decoder, rows

    row = rows.ROWS["llama3.1-8b v6e-8"]
    fn, args = decoder.step(row.training, row.abstract_mesh())
    jax.jit(fn, donate_argnums=0).trace(*args).lower(lowering_platforms=("cpu",))
"""

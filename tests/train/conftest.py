"""A compilation cache for all tests of training."""

# mypy: allow-untyped-calls

import os
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

FOR_CHILDREN = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of compiled programs, for all workers and the processes of tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.fixture(autouse=True, scope="package")
def _compile_once(compiled: str) -> Iterator[None]:
    options = {
        "jax_compilation_cache_dir": compiled,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

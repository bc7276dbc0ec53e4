"""Eight CPU devices, asked for before any test touches JAX's devices."""

import os

_EIGHT = "--xla_force_host_platform_device_count=8"
if _EIGHT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

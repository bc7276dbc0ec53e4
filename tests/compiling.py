"""How tests compile: their programs compile for seconds and run for milliseconds."""

import os
from importlib.metadata import PackageNotFoundError, version

EVERY_CASE = "DRUMLINE_EVERY_CASE" in os.environ
"""Whether grids are walked whole, in half an hour, and not so that each value meets each other."""


def quick_flags(devices: int) -> str:
    """`XLA_FLAGS` for so many emulated devices and a compiler that optimises little.

    Told from the version, as a flag that XLA does not know ends the process.
    """
    flags = [
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    try:
        release = version("jaxlib").split(".")
    except PackageNotFoundError:
        return flags[0]
    if (int(release[0]), int(release[1])) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)

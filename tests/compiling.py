"""Compiler settings for tests, whose programs compile for seconds and run for milliseconds."""

from importlib.metadata import PackageNotFoundError, version


def quick_flags(devices: int) -> str:
    """Return `XLA_FLAGS` for a number of emulated devices and few optimizations.

    The flags depend on the version of jaxlib, because an unknown flag ends the process.
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

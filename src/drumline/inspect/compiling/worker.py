"""Compile programs for devices that do not exist, in a separate process.

    python worker.py cpu 256      for 256 emulated CPU devices
    python worker.py tpu          for TPU slices, with the TPU's own compiler (libtpu)

A request on stdin is a line of JSON with the length of the StableHLO that follows it. The answer on
stdout is a line of JSON with the length of the HLO text that follows it. This script imports JAX
but not Drumline, because the Python with the TPU's compiler need not have Drumline.
"""

import glob
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

# Passes of the CPU compiler that change the computation and communication to suit CPUs. They widen
# bf16 to f32 and the operands of matmuls to the type of the result, fuse differently from
# accelerators, sum in the order of a CPU's vectors, and hoist arrays out of loops that are cheaper
# to recompute in each iteration.
DISABLED_CPU_PASSES = (
    "all-reduce-promotion,float-normalization-bf16,float-normalization-f8e5m2,"
    "float-normalization-f8e4m3,float-normalization-f8e4m3fn,float-normalization-f8e4m3b11fnuz,"
    "float-normalization-f8e5m2fnuz,float-normalization-f8e4m3fnuz,float-normalization-f8e3m4,"
    "float-normalization-f8e8m0fnu,float-normalization-f4e2m1fn,convolution-group-converter,"
    "fusion,fusion-wrapper,"
    "operand_upcaster,result_caster,dot-library-rewriter,dot-library-passes,"
    "cpu-parallel-task-assigner,small-while-loop-hoisting,"
    "tree_reduction_rewriter,while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
)


def compile_options(request: dict[str, Any], assignment: Any, overrides: dict[str, Any]) -> Any:
    """Return the XLA options for a request."""
    from jax._src import compiler

    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=request["partitions"],
        device_assignment=assignment,
        env_options_overrides=overrides,
    )
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = request["shardy"]
    build.allow_spmd_sharding_propagation_to_parameters = request["propagate_in"]
    build.allow_spmd_sharding_propagation_to_output = request["propagate_out"]
    return options


def compile_for_cpus(request: dict[str, Any], code: bytes) -> dict[str, Any]:
    """Compile for emulated CPU devices.

    Return the program after all passes but before code generation, which fails for bf16.
    """
    import jax
    import numpy as np
    from jaxlib import xla_client

    folder = tempfile.mkdtemp(dir=os.environ.get("DRUMLINE_WORKER_FOLDER"))
    try:
        devices = jax.devices("cpu")[: request["partitions"]]
        overrides = {
            "xla_disable_hlo_passes": DISABLED_CPU_PASSES,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_backend_optimization_level": 0,
        }
        options = compile_options(request, np.arange(len(devices)).reshape(1, -1), overrides)
        compile_error = ""
        try:
            devices[0].client.compile_and_load(code, xla_client.DeviceList(tuple(devices)), options)
        except Exception as error:  # whatever XLA raises
            compile_error = str(error)
        dumps = glob.glob(os.path.join(folder, "*cpu_after_optimizations.txt"))
        if not dumps:
            return {"error": compile_error or "the compiler left no program behind", "text": ""}
        with open(dumps[0]) as file:
            return {"text": file.read()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compile_for_tpus(request: dict[str, Any], code: bytes) -> dict[str, Any]:
    """Compile with the TPU's compiler. Return the scheduled program and its memory statistics."""
    import numpy as np
    from jax._src.interpreters.mlir import make_ir_context
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    topology: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["topology_options"]
    )
    by_coordinates: dict[Any, Any] = {
        (*device.coords, device.core_on_chip): device for device in topology.devices
    }
    devices = [by_coordinates[tuple(coordinates)] for coordinates in request["places"]]
    ids = np.array([device.id for device in devices]).reshape(1, -1)
    options = compile_options(request, ids, request["options"])
    with make_ir_context():
        module = ir.Module.parse(code)
    executable = devices[0].client.compile(
        module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options
    )
    memory = executable.get_compiled_memory_stats()
    return {
        "text": executable.hlo_modules()[0].to_string(),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
    }


def exit_with_parent() -> None:
    """Exit when the parent process has ended, even during a compilation."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Answer requests until stdin is closed."""
    exit_with_parent()
    # Redirect the output of XLA and JAX to stderr. Only answers go to stdout.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    compile_program = compile_for_tpus if sys.argv[1] == "tpu" else compile_for_cpus
    while line := requests.readline():
        request = json.loads(line)
        code = requests.read(request["length"])
        try:
            answer = compile_program(request, code)
        except Exception as error:  # whatever the compiler raises
            answer = {"error": f"{type(error).__name__}: {error}", "text": ""}
        text = answer.pop("text").encode()
        header = {**answer, "number": request["number"], "length": len(text)}
        answers.write(json.dumps(header).encode() + b"\n" + text)
        answers.flush()


if __name__ == "__main__":
    main()

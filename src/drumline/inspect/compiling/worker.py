"""Compiles programs for devices that are not there, in a process of its own.

    python worker.py cpu 256      for so many emulated CPU devices
    python worker.py tpu          for TPU slices, with the TPU's own compiler (libtpu)

Each request on stdin is a line of JSON with the length of the StableHLO that follows it; the answer
on stdout is a line of JSON with the length of the HLO text that follows. A program of its own, with
JAX alone: the Python that has the TPU's compiler need not have Drumline.
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

# Passes of the CPU compiler that change what the program means to send or compute, for the sake of
# CPUs: they widen bf16 to f32, fuse as no accelerator does, sum in the order of a CPU's vectors,
# and carry arrays into loops that are cheaper to make again in each turn.
FOR_CPUS_ALONE = (
    "all-reduce-promotion,float-normalization-bf16,float-normalization-f8e5m2,"
    "float-normalization-f8e4m3,float-normalization-f8e4m3fn,float-normalization-f8e4m3b11fnuz,"
    "float-normalization-f8e5m2fnuz,float-normalization-f8e4m3fnuz,float-normalization-f8e3m4,"
    "float-normalization-f8e8m0fnu,float-normalization-f4e2m1fn,convolution-group-converter,"
    "fusion,fusion-wrapper,"
    "dot-library-rewriter,dot-library-passes,cpu-parallel-task-assigner,small-while-loop-hoisting,"
    "tree_reduction_rewriter,while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
)


def compile_options(request: dict[str, Any], assignment: Any, overrides: dict[str, Any]) -> Any:
    """XLA's options for a program of so many partitions."""
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
    """The program after all passes, before code is made of it, which would fail on bf16."""
    import jax
    import numpy as np
    from jaxlib import xla_client

    folder = tempfile.mkdtemp(dir=os.environ.get("DRUMLINE_WORKER_FOLDER"))
    try:
        devices = jax.devices("cpu")[: request["partitions"]]
        overrides = {
            "xla_disable_hlo_passes": FOR_CPUS_ALONE,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_backend_optimization_level": 0,
        }
        options = compile_options(request, np.arange(len(devices)).reshape(1, -1), overrides)
        refusal = ""
        try:
            devices[0].client.compile_and_load(code, xla_client.DeviceList(tuple(devices)), options)
        except Exception as error:  # whatever XLA says
            refusal = str(error)
        found = glob.glob(os.path.join(folder, "*cpu_after_optimizations.txt"))
        if not found:
            return {"error": refusal or "the compiler left no program behind", "text": ""}
        with open(found[0]) as text:
            return {"text": text.read()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compile_for_tpus(request: dict[str, Any], code: bytes) -> dict[str, Any]:
    """The scheduled program of the TPU's compiler, and the memory it needs."""
    import numpy as np
    from jax._src.interpreters.mlir import make_ir_context
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    topology: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["topology_options"]
    )
    at: dict[Any, Any] = {
        (*device.coords, device.core_on_chip): device for device in topology.devices
    }
    devices = [at[tuple(place)] for place in request["places"]]
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


def leave_with_the_parent() -> None:
    """End when the process that started this one has ended, even in the middle of a program."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Answer requests until stdin ends."""
    leave_with_the_parent()
    # What XLA and JAX print goes to stderr: stdout is for the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    work = compile_for_tpus if sys.argv[1] == "tpu" else compile_for_cpus
    while line := requests.readline():
        request = json.loads(line)
        code = requests.read(request["length"])
        try:
            answer = work(request, code)
        except Exception as error:  # whatever the compiler says
            answer = {"error": f"{type(error).__name__}: {error}", "text": ""}
        text = answer.pop("text").encode()
        header = {**answer, "number": request["number"], "length": len(text)}
        answers.write(json.dumps(header).encode() + b"\n" + text)
        answers.flush()


if __name__ == "__main__":
    main()

"""Compile a function with the best compiler available, for a number of devices and a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

import jax

from drumline.chips import Slice
from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.compiling.lowering import LoweredProgram, lower
from drumline.inspect.compiling.meshes import (
    MeshLike,
    argument_meshes,
    device_coordinates,
    mesh_axes,
)
from drumline.inspect.compiling.scaling import extrapolate, resize_mesh, shorter_meshes
from drumline.inspect.compiling.workers import (
    MAX_DEVICES,
    cpu_worker,
    has_tpu_compiler,
    tpu_worker,
)
from drumline.inspect.cost.machines import Machine
from drumline.inspect.hlo.text import Module, inline_fusions, parse_module

Compiler = Literal["auto", "cpu", "tpu", "here"]
"""The CPU's compiler with emulated devices, the TPU's, or that of this process's devices."""

_TOPOLOGY_NAMES = {"7x": "tpu7x"}
_ONE_DEVICE_PER_CHIP = {"v4": {"chip_config_name": "megacore"}}
"""Topology options for one device per chip, as on Cloud TPU VMs. libtpu's default is two."""


@dataclass(frozen=True)
class InspectedProgram:
    """A compiled program."""

    name: str
    module: Module = field(repr=False)
    mesh: MeshAxes
    compiler: str
    """`cpu`, `tpu` or `gpu`."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes per device from the TPU's compiler. Empty for other compilers."""
    numbering_mesh: MeshAxes | None = None
    """The smaller mesh that the replica groups refer to, if the program is extrapolated."""
    other_meshes: tuple[MeshAxes, ...] = ()
    """Further meshes in the program with the same number of devices."""
    widened: bool = False
    """True if bfloat16 is computed in float32, as on CPUs."""

    @property
    def devices(self) -> int:
        """The number of devices that run the program."""
        return prod(self.mesh.values()) if self.numbering_mesh else self.module.partitions

    @property
    def compiled_by(self) -> str:
        """The compiler, as text."""
        if self.numbering_mesh:
            mesh = format_mesh(self.numbering_mesh)
            return f"the CPU backend, for {mesh} and less, and extrapolated"
        return {
            "cpu": "the CPU backend, for emulated devices",
            "tpu": "the TPU's own compiler",
            "gpu": "the GPU's compiler",
        }.get(self.compiler, self.compiler)


def compile_for(
    machine: Machine | None,
    fn: Any,
    args: tuple[Any, ...],
    *,
    mesh: MeshLike | None,
    compiler: Compiler,
    options: Mapping[str, Any] | None = None,
) -> InspectedProgram:
    """Compile a function for a machine.

    A GPU's compiler is that of this process, if it has a GPU. The TPU's compiler supports one
    slice. In all other cases the CPU's compiler runs with emulated devices.

    Args:
        machine: the machine. None stands for the devices of this process.
        fn: a function, or a `jax.stages.Lowered` or `Compiled`.
        args: its arguments, or their shapes.
        mesh: the mesh, if the arguments do not have one.
        compiler: the compiler to use.
        options: options of the TPU's compiler by name, as in `compile(compiler_options=…)`.

    Raises:
        UserError: the function cannot be compiled, or not by this compiler.
    """
    slice_type = None if machine is None or machine.slices > 1 else machine.slice
    if compiler == "tpu" and machine is not None and slice_type is None:
        raise UserError(
            f"the TPU's compiler supports single slices of TPUs, and not {machine.name}"
        )
    if (
        compiler == "auto"
        and machine is not None
        and machine.slices > 1
        and machine.slice is not None
    ):
        compiler = "cpu"
    return compile_program(
        fn, args, mesh=mesh, slice_type=slice_type, compiler=compiler, options=options
    )


def compile_program(
    function: Any,
    arguments: tuple[Any, ...],
    *,
    mesh: MeshLike | None = None,
    slice_type: Slice | None = None,
    compiler: Compiler = "auto",
    options: Mapping[str, Any] | None = None,
) -> InspectedProgram:
    """Compile a function, or read one that is compiled already.

    Raises:
        UserError: it does not trace or compile, or does not fit the mesh or the slice.
    """
    if isinstance(function, jax.stages.Compiled):
        return _read_compiled(function, mesh)
    if compiler not in get_args(Compiler):
        raise UserError(
            f"{compiler!r} is not a compiler; choose from {', '.join(get_args(Compiler))}"
        )
    chosen = _choose_compiler(compiler, slice_type, mesh, arguments)
    device_kind = None if slice_type is None else f"TPU {slice_type.generation}"
    if chosen == "cpu" and slice_type is not None:
        # JAX lowers some functions, such as random numbers, differently for TPUs. The CPU's
        # compiler may reject what exists only on TPUs, such as kernels.
        with suppress(UserError):
            program = lower(function, arguments, mesh=mesh, platform="tpu", device_kind=device_kind)
            # The CPU's compiler cannot see into a TPU kernel. The lowering for CPUs replaces it.
            if b"tpu_custom_call" not in program.code:
                return _compile_on_cpu(program)
    # A `Lowered` keeps the platform that it was lowered for.
    platform = {"cpu": "cpu", "tpu": "tpu"}.get(chosen)
    program = lower(function, arguments, mesh=mesh, platform=platform, device_kind=device_kind)
    if chosen == "tpu" and slice_type is not None:
        return _compile_on_tpu(program, slice_type, options or {})
    if chosen == "here":
        module = parse_module(program.lowered.compile().as_text())
        return InspectedProgram(program.name, module, _main_mesh(program), jax.default_backend())
    return _compile_on_cpu(program)


def _choose_compiler(
    compiler: Compiler,
    slice_type: Slice | None,
    mesh: MeshLike | None,
    arguments: tuple[Any, ...],
) -> str:
    if compiler != "auto":
        if compiler == "tpu" and slice_type is None:
            raise UserError("the TPU's compiler needs a slice: name one, such as v5litepod-8")
        if compiler == "tpu" and not has_tpu_compiler():
            raise UserError(
                "the TPU's compiler is not installed here: pip install 'drumline[tpu]', on x86_64 "
                "Linux, or name a Python that has it in DRUMLINE_TPU_PYTHON"
            )
        return compiler
    if slice_type is not None:
        return "tpu" if has_tpu_compiler() else "cpu"
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise UserError(f"JAX does not start: {str(error).splitlines()[0]}") from error
    if backend == "cpu":
        return "cpu"
    meshes = argument_meshes(arguments)
    if mesh is not None:
        meshes.append(mesh_axes(mesh))
    device_count = max((prod(axes.values()) for axes in meshes), default=1)
    return "here" if device_count <= jax.device_count() else "cpu"


def _main_mesh(program: LoweredProgram) -> MeshAxes:
    """Return the mesh whose axis names reports use."""
    for axes in program.meshes:
        if prod(axes.values()) == program.partitions:
            return axes
    return {"devices": program.partitions} if program.partitions > 1 else {}


def _compile_on_cpu(program: LoweredProgram) -> InspectedProgram:
    axes = _main_mesh(program)
    if program.partitions > MAX_DEVICES:
        return _compile_extrapolated(program, axes)
    other_meshes = tuple(
        mesh
        for mesh in program.meshes
        if prod(mesh.values()) == program.partitions and mesh != axes
    )
    return InspectedProgram(
        program.name, _run_cpu_worker(program), axes, "cpu", other_meshes=other_meshes
    )


def _compile_extrapolated(program: LoweredProgram, axes: MeshAxes) -> InspectedProgram:
    """Compile for fewer devices than the program has, and extrapolate."""
    meshes = shorter_meshes(axes, MAX_DEVICES)
    text = program.lowered.as_text(debug_info=True)
    modules = []
    for mesh in meshes:
        code = resize_mesh(text, mesh).encode()
        smaller = replace(program, partitions=prod(mesh.values()), code=code)
        modules.append(_run_cpu_worker(smaller))
    module = extrapolate(modules, meshes, axes)
    return InspectedProgram(program.name, module, axes, "cpu", numbering_mesh=meshes[-1])


def _run_cpu_worker(program: LoweredProgram) -> Module:
    answer = cpu_worker(program.partitions).compile(_request(program), program.code)
    return inline_fusions(parse_module(answer.text))


def _compile_on_tpu(
    program: LoweredProgram, slice_type: Slice, options: Mapping[str, Any]
) -> InspectedProgram:
    axes = _main_mesh(program)
    generation = _TOPOLOGY_NAMES.get(slice_type.generation, slice_type.generation)
    one_per_chip = program.partitions == slice_type.chips
    # The function's own options, except those that only other compilers know.
    own_options = {
        name: value
        for name, value in program.options.items()
        if not name.startswith(("xla_cpu_", "xla_gpu_"))
    }
    request = _request(program) | {
        "topology": f"{generation}:{'x'.join(str(side) for side in slice_type.topology)}",
        "topology_options": _ONE_DEVICE_PER_CHIP.get(generation, {}) if one_per_chip else {},
        "places": device_coordinates(slice_type, axes),
        "options": own_options | dict(options),
    }
    answer = tpu_worker().compile(request, program.code)
    return InspectedProgram(program.name, parse_module(answer.text), axes, "tpu", answer.memory)


def _request(program: LoweredProgram) -> dict[str, Any]:
    return {
        "partitions": program.partitions,
        "shardy": program.shardy,
        "propagate_in": list(program.propagate_in),
        "propagate_out": list(program.propagate_out),
    }


def _read_compiled(compiled: jax.stages.Compiled, mesh: MeshLike | None) -> InspectedProgram:
    text = compiled.as_text()
    if text is None:
        raise UserError("this compiled program has no text: give the function, or a Lowered")
    module = parse_module(text)
    device_count = module.partitions
    meshes = [] if mesh is None else [mesh_axes(mesh)]
    if meshes and prod(meshes[0].values()) != device_count:
        raise UserError(
            f"the mesh {format_mesh(meshes[0])} has {prod(meshes[0].values())} devices, and the "
            f"compiled program runs on {device_count}"
        )
    for shardings in (compiled.input_shardings, compiled.output_shardings):
        meshes += argument_meshes(jax.tree.map(_WithSharding, shardings))
    default = {"devices": device_count} if device_count > 1 else {}
    fitting = (axes for axes in meshes if prod(axes.values()) == device_count)
    backend = _detect_backend(text)
    return InspectedProgram(
        module.name, module, next(fitting, default), backend, widened=backend == "cpu"
    )


@dataclass
class _WithSharding:
    """A stand-in for an array with a sharding."""

    sharding: Any


def _detect_backend(text: str) -> str:
    if "estimated_cycles" in text or ":T(" in text:
        return "tpu"
    gpu = ("__cublas", "__cudnn", "gpu_backend_config", '"triton', "fusion_backend_config")
    return "gpu" if any(marker in text for marker in gpu) else "cpu"

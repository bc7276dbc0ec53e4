"""The compiled program to read: whose compiler made it, for how many devices, on which mesh."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

import jax

from drumline.chips import Slice
from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.compiling.lowering import LoweredProgram, lower
from drumline.inspect.compiling.meshes import MeshLike, axes_of_mesh, meshes_in, places_on
from drumline.inspect.compiling.scaling import carried_on, on_mesh, shorter_meshes
from drumline.inspect.compiling.workers import (
    MOST_DEVICES,
    cpu_worker,
    has_tpu_compiler,
    tpu_worker,
)
from drumline.inspect.cost.machines import Machine
from drumline.inspect.hlo.text import Module, parse_module, without_fusions

Compiler = Literal["auto", "cpu", "tpu", "here"]
"""Whose compiler: that of emulated CPU devices, the TPU's own, that of this process's devices."""

_TOPOLOGY_NAMES = {"7x": "tpu7x"}
_ONE_DEVICE = {"v4": {"chip_config_name": "megacore"}}
"""What makes one device of a chip's cores, as on Cloud TPU VMs, where libtpu would make two."""


@dataclass(frozen=True)
class InspectedProgram:
    """A compiled program."""

    name: str
    module: Module = field(repr=False)
    mesh: Axes
    compiler: str
    """Who compiled it: `cpu`, `tpu` or `gpu`."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes per device as the TPU's compiler tells them."""
    groups: Axes | None = None
    """The mesh by which its groups of devices are numbered, where it is told from a smaller one."""
    other_meshes: tuple[Axes, ...] = ()
    """More meshes that it names, of as many devices."""
    widened: bool = False
    """Whether bfloat16 was computed in float32, as CPUs have it."""

    @property
    def devices(self) -> int:
        """How many devices run it."""
        return prod(self.mesh.values()) if self.groups else self.module.partitions

    @property
    def compiled_by(self) -> str:
        """In words."""
        if self.groups:
            return f"the CPU backend, for {shown(self.groups)} and less, and told from there"
        return {
            "cpu": "the CPU backend, for emulated devices",
            "tpu": "the TPU's own compiler",
            "gpu": "the GPU's compiler",
        }.get(self.compiler, self.compiler)


def compiled_program(
    function: Any,
    arguments: tuple[Any, ...],
    *,
    mesh: MeshLike | None = None,
    on: Slice | None = None,
    compiler: Compiler = "auto",
    options: Mapping[str, Any] | None = None,
) -> InspectedProgram:
    """Compile a function, or take what is compiled.

    Raises:
        UserError: it does not trace or compile, or does not fit the mesh or the slice.
    """
    if isinstance(function, jax.stages.Compiled):
        return _of_compiled(function, mesh)
    if compiler not in get_args(Compiler):
        raise UserError(f"{compiler!r} is no compiler; there are {', '.join(get_args(Compiler))}")
    chosen = _choose(compiler, on, mesh, arguments)
    kind = None if on is None else f"TPU {on.generation}"
    if chosen == "cpu" and on is not None:
        # JAX writes some things in another way for CPUs, random numbers for one. What it writes for
        # TPUs alone, such as kernels, the CPU's compiler may refuse.
        with suppress(UserError):
            program = lower(function, arguments, mesh=mesh, platform="tpu", kind=kind)
            # A kernel is a closed box to it: what it stands for on other platforms can be read.
            if b"tpu_custom_call" not in program.code:
                return _by_cpus(program)
    # Lowered already, it is lowered for what it was lowered for.
    platform = {"cpu": "cpu", "tpu": "tpu"}.get(chosen)
    program = lower(function, arguments, mesh=mesh, platform=platform, kind=kind)
    axes = _mesh_of(program)
    if chosen == "tpu" and on is not None:
        return _for_tpu(program, axes, on, options or {})
    if chosen == "here":
        text = program.lowered.compile().as_text()
        return InspectedProgram(program.name, parse_module(text), axes, jax.default_backend())
    return _by_cpus(program)


def _by_cpus(program: LoweredProgram) -> InspectedProgram:
    axes = _mesh_of(program)
    if program.partitions > MOST_DEVICES:
        return _beyond(program, axes)
    return InspectedProgram(
        program.name, _on_cpus(program), axes, "cpu", other_meshes=_others(program, axes)
    )


def _others(program: LoweredProgram, axes: Axes) -> tuple[Axes, ...]:
    alike = (mesh for mesh in program.meshes if prod(mesh.values()) == program.partitions)
    return tuple(mesh for mesh in alike if mesh != axes)


def _on_cpus(program: LoweredProgram) -> Module:
    answer = cpu_worker(program.partitions).compile(_request(program), program.code)
    return without_fusions(parse_module(answer.text))


def _beyond(program: LoweredProgram, axes: Axes) -> InspectedProgram:
    """For more devices than the CPU backend has: carried on from fewer."""
    meshes = shorter_meshes(axes, MOST_DEVICES)
    text = program.lowered.as_text(debug_info=True)
    modules = [
        _on_cpus(
            replace(program, partitions=prod(mesh.values()), code=on_mesh(text, mesh).encode())
        )
        for mesh in meshes
    ]
    module = carried_on(modules, meshes, axes)
    return InspectedProgram(program.name, module, axes, "cpu", groups=meshes[-1])


def _choose(
    compiler: Compiler, on: Slice | None, mesh: MeshLike | None, arguments: tuple[Any, ...]
) -> str:
    if compiler != "auto":
        if compiler == "tpu" and on is None:
            raise UserError(
                "the TPU's compiler has to know the slice: name one, such as v5litepod-8"
            )
        if compiler == "tpu" and not has_tpu_compiler():
            raise UserError(
                "the TPU's compiler is not installed here: pip install 'drumline[tpu]', on x86_64 "
                "Linux, or name a Python that has it in DRUMLINE_TPU_PYTHON"
            )
        return compiler
    if on is not None:
        return "tpu" if has_tpu_compiler() else "cpu"
    try:
        here = jax.default_backend()
    except RuntimeError as wrong:
        raise UserError(f"JAX does not start: {str(wrong).splitlines()[0]}") from wrong
    if here == "cpu":
        return "cpu"
    wanted = [prod(axes.values()) for axes in meshes_in(arguments)]
    if mesh is not None:
        wanted.append(prod(axes_of_mesh(mesh).values()))
    return "here" if max(wanted, default=1) <= jax.device_count() else "cpu"


def _mesh_of(program: LoweredProgram) -> Axes:
    """The mesh to name axes by: the first with as many devices as the program."""
    for axes in program.meshes:
        if prod(axes.values()) == program.partitions:
            return axes
    return {"devices": program.partitions} if program.partitions > 1 else {}


def _request(program: LoweredProgram) -> dict[str, Any]:
    return {
        "partitions": program.partitions,
        "shardy": program.shardy,
        "propagate_in": list(program.propagate_in),
        "propagate_out": list(program.propagate_out),
    }


def _for_tpu(
    program: LoweredProgram, axes: Axes, on: Slice, options: Mapping[str, Any]
) -> InspectedProgram:
    kind = _TOPOLOGY_NAMES.get(on.generation, on.generation)
    request = _request(program) | {
        "topology": f"{kind}:{'x'.join(str(side) for side in on.topology)}",
        "topology_options": _ONE_DEVICE.get(kind, {}) if program.partitions == on.chips else {},
        "places": places_on(on, axes),
        "options": _known_to_tpus(program.options) | dict(options),
    }
    answer = tpu_worker().compile(request, program.code)
    return InspectedProgram(program.name, parse_module(answer.text), axes, "tpu", answer.memory)


def _known_to_tpus(options: Mapping[str, Any]) -> dict[str, Any]:
    """A function's own options, without those that other platforms' compilers alone know."""
    return {
        name: value
        for name, value in options.items()
        if not name.startswith(("xla_cpu_", "xla_gpu_"))
    }


def _of_compiled(compiled: jax.stages.Compiled, mesh: MeshLike | None) -> InspectedProgram:
    text = compiled.as_text()
    if text is None:
        raise UserError("this compiled program has no text: give the function, or what was lowered")
    module = parse_module(text)
    placed = [] if mesh is None else [axes_of_mesh(mesh)]
    for shardings in (compiled.input_shardings, compiled.output_shardings):
        placed += meshes_in(jax.tree.map(_Placed, shardings))
    devices = module.partitions
    fitting = [axes for axes in placed if prod(axes.values()) == devices]
    if mesh is not None and not fitting[:1] == placed[:1]:
        raise UserError(
            f"the mesh {shown(placed[0])} has {prod(placed[0].values())} devices, and the compiled "
            f"program runs on {devices}"
        )
    axes = fitting[0] if fitting else ({"devices": devices} if devices > 1 else {})
    backend = _backend(text)
    return InspectedProgram(module.name, module, axes, backend, widened=backend == "cpu")


@dataclass
class _Placed:
    """A sharding as an array would carry it."""

    sharding: Any


def _backend(text: str) -> str:
    if "estimated_cycles" in text or ":T(" in text:
        return "tpu"
    gpu = ("__cublas", "__cudnn", "gpu_backend_config", '"triton', "fusion_backend_config")
    return "gpu" if any(mark in text for mark in gpu) else "cpu"


def compiled_for(
    target: Machine | None,
    fn: Any,
    args: tuple[Any, ...],
    *,
    mesh: MeshLike | None,
    compiler: Compiler,
    options: Mapping[str, Any] | None = None,
) -> InspectedProgram:
    """The program that a compiler makes of a function for a machine.

    A GPU's compiler is that of this process, if it has one. The TPU's knows one slice alone: for
    several, and where there is neither, emulated CPU devices stand in.

    Args:
        target: the machine, None for what is here.
        fn: the function, or what was lowered or compiled of it.
        args: its arguments, or their shapes.
        mesh: the mesh, where the arguments do not bring it.
        compiler: whose.
        options: the TPU compiler's own, by name, as `compile(compiler_options=…)` takes them.

    Raises:
        UserError: as `compiled_program`, and where a compiler is asked for what it cannot do.
    """
    one_slice = None if target is None or target.slices > 1 else target.slice
    if compiler == "tpu" and target is not None and one_slice is None:
        raise UserError(f"the TPU's compiler knows single slices of TPUs, and not {target.name}")
    if compiler == "auto" and target is not None and target.slice is not None and not one_slice:
        compiler = "cpu"
    return compiled_program(fn, args, mesh=mesh, on=one_slice, compiler=compiler, options=options)

"""Compare the numerics of JAX, PyTorch and exact arithmetic, and explain differences.

Names are imported on first use, because only comparisons with PyTorch need PyTorch, and JAX takes a
second to import.
"""

from importlib import import_module
from typing import Any

from drumline.deprecated import lookup

_MODULES: dict[str, tuple[str, ...]] = {
    "drumline.numerics.comparison": ("ErrorComparison", "compare"),
    "drumline.numerics.errors": ("ErrorStatistics", "error_statistics"),
    "drumline.numerics.finite": ("FirstNotFinite", "NotFinite", "check_finite", "first_not_finite"),
    "drumline.numerics.implementations": ("UnderJax", "UnderTorch"),
    "drumline.numerics.matmul": ("MatmulSurvey", "survey_matmul"),
    "drumline.numerics.ported.divergence": (
        "Divergence",
        "DivergenceCause",
        "LayerError",
        "trace_divergence",
    ),
    "drumline.numerics.ported.torch_values": ("LLAMA", "TIMM_VIT", "Rename"),
    "drumline.numerics.repetition": ("RepeatReport", "repeat"),
    "drumline.numerics.rounding.precision": ("PrecisionReport", "precision"),
    "drumline.numerics.topk": ("TopKWarning", "Violation", "top_k", "violations"),
    "drumline.numerics.topk_survey": ("TopKGrid", "TopKSurvey", "survey_topk"),
    "drumline.parallel.taps": ("scope", "tap"),
    "drumline.targets": ("Target", "load_target"),
}
"""The modules of the public names. No submodule may have one of these names, or it would hide
it."""
_NEW_NAMES = {
    "Mistake": "drumline.errors:UserError",
    "Repeated": "drumline.numerics:RepeatReport",
}

__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        return lookup(__name__, name, _NEW_NAMES)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)

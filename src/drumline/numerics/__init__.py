"""Where JAX, PyTorch and exact arithmetic part ways, and why.

Each name is imported when it is asked for: PyTorch is needed only where something is compared with
it, and JAX takes a second to start.
"""

from importlib import import_module
from typing import Any

_HOMES: dict[str, tuple[str, ...]] = {
    "comparison": ("ErrorComparison", "compare"),
    "errors": ("ErrorStatistics", "error_statistics"),
    "finite": ("FirstNotFinite", "NotFinite", "check_finite", "first_not_finite"),
    "implementations": ("UnderJax", "UnderTorch"),
    "matmul": ("MatmulSurvey", "survey_matmul"),
    "mistakes": ("Mistake",),
    "ported.divergence": ("trace_divergence",),
    "ported.names": ("LLAMA", "TIMM_VIT", "Rename"),
    "ported.report": ("Divergence", "DivergenceCause", "LayerError"),
    "repetition": ("Repeated", "repeat"),
    "rounding.precision": ("PrecisionReport", "precision"),
    "topk": ("TopKWarning", "Violation", "top_k", "violations"),
    "topk_survey": ("TopKGrid", "TopKSurvey", "survey_topk"),
}
"""Module → the names it gives; no module has the name of one of them, which it would hide."""
_ELSEWHERE = {
    "tap": "drumline.parallel.taps",
    "scope": "drumline.parallel.taps",
    "Target": "drumline.targets",
    "load_target": "drumline.targets",
}
"""What models need to be traced, and what names functions, from where they are."""

__all__ = [*_ELSEWHERE, *(name for names in _HOMES.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

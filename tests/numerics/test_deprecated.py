"""The old public names of `drumline.numerics` warn and work."""

from typing import Any

import numpy as np
import pytest

from drumline import numerics
from drumline.errors import UserError
from drumline.numerics.errors import error_statistics
from drumline.numerics.repetition import RepeatReport
from drumline.numerics.rounding.differences import Difference, Margin


def test_old_module_names() -> None:
    with pytest.warns(DeprecationWarning, match="drumline.errors.UserError"):
        assert numerics.Mistake is UserError
    with pytest.warns(DeprecationWarning, match="drumline.numerics.RepeatReport"):
        assert numerics.Repeated is RepeatReport


def test_old_attributes_and_keywords() -> None:
    old_keywords: dict[str, Any] = {"got": np.array([1.5], np.float32), "true": np.array([1.0])}
    with pytest.warns(DeprecationWarning, match="actual=|expected="):
        errors = error_statistics(**old_keywords)
    with pytest.warns(DeprecationWarning, match="ErrorStatistics.actual"):
        assert errors.got == 1.5
    with pytest.warns(DeprecationWarning, match="ErrorStatistics.expected"):
        assert errors.true == 1.0
    assert {"got", "true"} <= errors.to_dict().keys()
    with pytest.warns(DeprecationWarning, match="Difference.ulps"):
        assert Difference(1, 1, 0.5, 2.0).units == 2.0
    with pytest.warns(DeprecationWarning, match="Margin.ulps"):
        assert Margin(0.5, 2.0).units == 2.0


def test_old_attributes_of_reports() -> None:
    from drumline.numerics.finite import NonFiniteElement, NotFinite, first_not_finite
    from drumline.numerics.matmul import MatmulSurvey
    from drumline.numerics.ported.divergence import DivergenceCause, LayerError
    from drumline.numerics.rounding.execution import ExecutionMode
    from drumline.numerics.rounding.first_difference import FirstDifference
    from drumline.numerics.rounding.precision import VariantReport
    from drumline.numerics.rounding.tracing import SourceLine, TracedOperation

    operation = TracedOperation(1, "add", ("x",), ("y",), SourceLine("f.py", 1))
    element = NonFiniteElement("w", (0,), "nan", 1, 1)
    first = first_not_finite([np.array([np.nan], np.float32)])
    old_and_new = [
        (operation, "takes", "inputs"),
        (operation, "gives", "outputs"),
        (operation, "place", "source"),
        (FirstDifference(operation, Difference(1, 1, 0.5, 2.0), "fused"), "why", "reason"),
        (VariantReport(ExecutionMode.HIGHEST, ()), "way", "mode"),
        (DivergenceCause("epsilon", "with another", 0.0), "words", "description"),
        (DivergenceCause("epsilon", "with another", 0.0), "error_left", "remaining_error"),
        (LayerError("a", "b", 0.0, 0.0, 0.0, ("x", "x")), "parts", "diverges"),
        (MatmulSurvey("cpu", 4, (), {}), "products", "measurements"),
        (MatmulSurvey("cpu", 4, (), {}), "of", "select"),
        (NotFinite(element), "place", "element"),
        (first, "place", "read"),
    ]
    for instance, old_name, new_name in old_and_new:
        with pytest.warns(DeprecationWarning, match=f"{type(instance).__name__}.{new_name}"):
            old_value = getattr(instance, old_name)
        assert old_value == getattr(instance, new_name)
    with pytest.warns(DeprecationWarning, match="FirstNotFinite.encoded"):
        assert first.found is first.encoded

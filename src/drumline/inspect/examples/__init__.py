"""Programs to look at: those of "Programming TPUs in JAX", and our own models' training steps."""

from drumline.inspect.examples.program import Example
from drumline.inspect.examples.registry import example, examples

__all__ = ["Example", "example", "examples"]

"""The benchmarks' packages, where these tests can import them as the benchmarks do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

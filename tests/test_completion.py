"""Tab completion in Python: the public names of a package are listed before they are loaded."""

import subprocess
import sys

import pytest

LISTED = """
import importlib, sys
package = importlib.import_module(sys.argv[1])
missing = set(package.__all__) - set(dir(package))
print(sorted(missing), "jax" in sys.modules)
"""


@pytest.mark.parametrize("name", ["drumline.train", "drumline.jobs"])
def test_public_names_are_listed_before_they_are_loaded(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LISTED, name], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[] False\n", "and nothing is loaded for it"

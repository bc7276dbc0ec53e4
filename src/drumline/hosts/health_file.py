"""The burn-in as one file: the part of Drumline that it needs, zipped, for hosts that have none."""

import hashlib
from functools import cache
from pathlib import Path

import drumline
from drumline.health.fault_report import BURN_IN_FAILED
from drumline.hosts.agent_file import zipped_files

PACKAGE = Path(drumline.__file__).parent
PARTS = (
    "__init__.py",
    "errors.py",
    "deprecated.py",
    "heartbeat.py",
    "distributed.py",
    "chips",
    "health",
)
UNTESTED = '{"verdict": "warn", "said": "chips were not tested: the burn-in could not run"}'
# As `python -m` would: the module itself decides how its process ends.
START = "import runpy\n\nrunpy.run_module('drumline.health', run_name='__main__')\n"


@cache
def health_file() -> tuple[str, str, bytes]:
    """Its name on the host, the sha of its content, and the content."""
    files = {"__main__.py": START}
    for part in PARTS:
        place = PACKAGE / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            files[f"drumline/{path.relative_to(PACKAGE).as_posix()}"] = path.read_text()
    content = zipped_files(files)
    sha = hashlib.sha256(content).hexdigest()
    return f"health-{sha[:12]}.pyz", sha, content


def burn_in_line(seconds: float) -> str:
    """What a shell does before the program: a burn-in that ends the run if a chip is bad.

    Without the end of a line, so that the lines of the program keep their numbers. Where it cannot
    run, as without a `python3`, that is said, and the program runs untested. The folders are found
    by the heartbeat's: in a container, $HOME is another one.
    """
    name, _, _ = health_file()
    report = '"${DRUMLINE_HEARTBEAT%/*}"/burnin.json'
    return (
        f'python3 "${{DRUMLINE_HEARTBEAT%/jobs/*}}"/{name} --job --seconds {seconds:g}'
        f" || if [ $? = {BURN_IN_FAILED} ]; then exit {BURN_IN_FAILED}; fi; "
        f"[ -e {report} ] || echo '{UNTESTED}' >{report} || true; "
    )

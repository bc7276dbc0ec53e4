"""The files that are copied to hosts: the agent and the burn-in, each as one zip file."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import drumline
from drumline.health.fault_report import BURN_IN_FAILED


def zip_texts(texts: Mapping[str, str]) -> bytes:
    """Return an uncompressed zip file, which depends only on the names and the texts."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in texts.items():
            # ZipInfo has a fixed date. With the current one, each server would make a new agent.
            archive.writestr(zipfile.ZipInfo(name), text)
    return content.getvalue()


# The agent ---------------------------------------------------------------------------------------

AGENT_SOURCES = Path(__file__).with_name("agent")
# Python runs the __main__.py of a zip file. The agent's own imports are relative.
AGENT_MAIN = "import sys\n\nfrom agent.main import main\n\nmain(sys.argv[1:])\n"


def zip_agent() -> bytes:
    """Return the agent as a zip file. It is uncompressed, because every call reads it."""
    texts = {"__main__.py": AGENT_MAIN}
    for path in sorted(AGENT_SOURCES.rglob("*.py")):
        texts[f"agent/{path.relative_to(AGENT_SOURCES).as_posix()}"] = path.read_text()
    return zip_texts(texts)


AGENT = zip_agent()
AGENT_SHA = hashlib.sha256(AGENT).hexdigest()
AGENT_FILE = f"agent-{AGENT_SHA[:8]}"


# The burn-in -------------------------------------------------------------------------------------

PACKAGE = Path(drumline.__file__).parent
BURN_IN_SOURCES = (
    "__init__.py",
    "errors.py",
    "deprecated.py",
    "heartbeat.py",
    "distributed.py",
    "chips",
    "health",
)
# As `python -m` does: the module itself sets the exit code.
BURN_IN_MAIN = "import runpy\n\nrunpy.run_module('drumline.health', run_name='__main__')\n"
NOT_TESTED = '{"verdict": "warn", "said": "chips were not tested: the burn-in could not run"}'


@cache
def burn_in_file() -> tuple[str, str, bytes]:
    """Return the name of the burn-in on a host, the sha of its content, and the content."""
    texts = {"__main__.py": BURN_IN_MAIN}
    for name in BURN_IN_SOURCES:
        source = PACKAGE / name
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            texts[f"drumline/{path.relative_to(PACKAGE).as_posix()}"] = path.read_text()
    content = zip_texts(texts)
    sha = hashlib.sha256(content).hexdigest()
    return f"health-{sha[:12]}.pyz", sha, content


def burn_in_command(seconds: float) -> str:
    """Return shell commands that run the burn-in and end the script if a chip is bad.

    They end without a newline, so that the program keeps its line numbers. If the burn-in cannot
    run, for example without `python3`, its report says so and the program runs. The folders are
    taken from the path of the heartbeat, because $HOME is different in a container.
    """
    name, _, _ = burn_in_file()
    report = '"${DRUMLINE_HEARTBEAT%/*}"/burnin.json'
    return (
        f'python3 "${{DRUMLINE_HEARTBEAT%/jobs/*}}"/{name} --job --seconds {seconds:g}'
        f" || if [ $? = {BURN_IN_FAILED} ]; then exit {BURN_IN_FAILED}; fi; "
        f"[ -e {report} ] || echo '{NOT_TESTED}' >{report} || true; "
    )

"""The agent as it is on a host, so that a test need not install it."""

import hashlib
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from drumline.hosts.host_files import AGENT, AGENT_FILE
from drumline.hosts.remote import INSTALL


def installed(name: str, content: bytes) -> bytes:
    """Return a zip file of Python modules as it is on a host."""
    with TemporaryDirectory() as home:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", INSTALL, name, hashlib.sha256(content).hexdigest()],
            input=content,
            env={"HOME": home},
            check=True,
        )
        return Path(home, ".drumline", name).read_bytes()


@cache
def installed_agent() -> bytes:
    """Return the agent as it is on a host."""
    return installed(AGENT_FILE, AGENT)

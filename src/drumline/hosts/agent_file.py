"""The agent as one file: its package zipped, the same bytes for the same sources."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).with_name("agent")
# The file that Python runs in a zip; the package's imports are relative, so any name will do.
START = "import sys\n\nfrom agent.main import main\n\nmain(sys.argv[1:])\n"


def zipped() -> bytes:
    """The zip file, uncompressed: it is read at every call, and sent once."""
    files = {"__main__.py": START}
    for path in sorted(SOURCES.rglob("*.py")):
        files[f"agent/{path.relative_to(SOURCES).as_posix()}"] = path.read_text()
    return zipped_files(files)


def zipped_files(files: Mapping[str, str]) -> bytes:
    """A zip file of these texts by name, the same bytes for the same texts."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            # With a fixed date, or each start of the server would make another agent.
            archive.writestr(zipfile.ZipInfo(name), text)
    return content.getvalue()


AGENT = zipped()
AGENT_SHA = hashlib.sha256(AGENT).hexdigest()
AGENT_FILE = f"agent-{AGENT_SHA[:8]}"

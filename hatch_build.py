"""Make the description of the package from README.md.

README.md links files of the repository. A package page cannot resolve these links. They become
absolute if `[project.urls]` in pyproject.toml has `Source`, the address that a path is appended to,
and plain text if not.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)")


class Description(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": describe(text, source),
        }


def describe(readme: str, source: str | None) -> str:
    """Return the text of README.md without relative links."""
    if source is None:
        return _RELATIVE_LINK.sub(r"\1", readme)
    return _RELATIVE_LINK.sub(
        lambda link: f"[{link[1]}]({source.rstrip('/')}/{link[2]})",
        readme,
    )

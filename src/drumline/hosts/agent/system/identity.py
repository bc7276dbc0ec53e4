"""Which machine this is, as far as it can be known: most names change with every slice."""

from __future__ import annotations

import contextlib
import os

from .machine import metadata, on_google

ASKED = {
    "physical_host": "attributes/physical_host",
    "physical_host_topology": "attributes/physical_host_topology",
    "instance_id": "id",
}
"""What the metadata server may know, by the name it has with us. The first names the machine itself
and stays; Google documents it for some kinds of capacity only."""


def identity() -> dict[str, str]:
    """What is known, by name; nothing where nobody says."""
    machine = os.environ.get("DRUMLINE_MACHINE")
    if machine:
        path = os.path.join(machine, "physical_host")
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return {"physical_host": file.read(1000).strip()}
        return {}
    if not on_google():
        return {}
    told = {name: metadata(place, 1.0) for name, place in ASKED.items()}
    return {name: text for name, text in told.items() if text}

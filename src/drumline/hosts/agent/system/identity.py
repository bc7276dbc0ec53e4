"""Which machine this is, as far as it can be known: most names change with every slice."""

from __future__ import annotations

import contextlib
import os

ATTRIBUTES = "/computeMetadata/v1/instance/"
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
    try:
        with open("/sys/class/dmi/id/product_name") as product:
            if "Google" not in product.read():
                return {}
    except OSError:
        return {}
    import http.client  # only here: it takes as long to load as all the rest

    found = {}
    for name, path in ASKED.items():
        with contextlib.suppress(OSError, http.client.HTTPException, UnicodeDecodeError):
            server = http.client.HTTPConnection("metadata.google.internal", timeout=1.0)
            try:
                server.request("GET", ATTRIBUTES + path, headers={"Metadata-Flavor": "Google"})
                answer = server.getresponse()
                text = answer.read(1000).decode().strip()
                if answer.status == 200 and text:
                    found[name] = text
            finally:
                server.close()
    return found

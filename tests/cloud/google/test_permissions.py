"""The permissions and APIs that a project needs."""

from pathlib import Path

import pytest

from drumline.cloud.google.permissions import APIS, PERMISSIONS, Permission

PAGE = (Path(__file__).parents[3] / "docs" / "google-cloud.md").read_text()


@pytest.mark.parametrize("permission", PERMISSIONS, ids=lambda permission: permission.name)
def test_the_page_names_each_permission_with_its_role(permission: Permission) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{permission.name}`")]
    assert len(rows) == 1
    assert f"`{permission.role}`" in rows[0]


@pytest.mark.parametrize("api", APIS)
def test_the_page_names_each_api(api: str) -> None:
    assert f"| `{api}` |" in PAGE

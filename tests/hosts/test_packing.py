"""The packed files of folders with secrets, and the folders that are rejected."""

import base64

import pytest

from drumline.hosts.packing.contents import SecretScan
from tests.hosts.packing_table import CASES, GIT, Case, run, undone


@pytest.mark.skipif(GIT is None, reason="needs git")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_files_that_are_sent_left_out_or_rejected(case: Case) -> None:
    with undone():
        result = run(case)
    if case.refused:
        assert case.refused in result.refused
        assert "\n" not in result.refused
        return
    assert result.refused == ""
    assert sorted(result.sent) == sorted(case.sent)
    assert result.left_out == case.left_out


@pytest.mark.parametrize("before", ["", "p", "pr", "pro", "project: x\n"])
def test_a_key_in_base64_is_found_at_every_offset(before: str) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0B" * 8 + "\n-----END"
    scan = SecretScan(["deploy.yaml"])
    scan.feed(b"data: " + base64.b64encode((before + key).encode()))
    assert scan.reason() == "private key"

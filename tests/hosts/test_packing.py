"""What is sent of a folder with secrets in it, and what is left out or refused."""

import pytest

from tests.hosts.packing_table import CASES, GIT, Case, run, undone


@pytest.mark.skipif(GIT is None, reason="needs git")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_folder_is_sent_left_out_or_refused(case: Case) -> None:
    with undone():
        result = run(case)
    if case.refused:
        assert case.refused in result.refused
        assert "\n" not in result.refused
        return
    assert result.refused == ""
    assert sorted(result.sent) == sorted(case.sent)
    assert result.left_out == case.left_out

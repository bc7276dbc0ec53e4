import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main

MEANS = {
    "stockout",
    "quota",
    "rate limit",
    "denied",
    "invalid",
    "transient",
    "preempted",
    "program",
    "bad host",
    "ambiguous start",
}
ACTIONS = {"next zone", "later", "stop", "another slice", "count a failure"}
STOCKOUT = 'There is no more capacity in the zone "us-central2-b"'


class Explain:
    """Run `drumline explain` with a text on stdin."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.patch = patch

    def __call__(self, text: str | bytes, *options: str) -> tuple[int, str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        self.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as caught:
            main(["explain", *options])
        code = caught.value.code
        out, err = self.capsys.readouterr()
        return code if isinstance(code, int) else 0, out, err

    def api(self, text: str | bytes, *options: str) -> dict[str, Any]:
        code, out, err = self(text, "--api", "--json", *options)
        assert code == 0, err
        explained: dict[str, Any] = json.loads(out)
        assert explained.keys() == {"means", "action", "says"}
        assert explained["means"] in MEANS
        assert explained["action"] in ACTIONS
        return explained


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    return Explain(capsys, monkeypatch)


def test_explain_prints_the_meaning_the_reaction_and_the_fix(explain: Explain) -> None:
    code, out, _ = explain(STOCKOUT, "--api", "--http", "429")
    assert code == 0
    meaning, words, reaction, advice = out.splitlines()
    assert meaning == "means: stockout (no capacity in us-central2-b)"
    assert words == f"The cloud's own words: {STOCKOUT}"
    assert reaction.startswith("Drumline would: next zone (")
    assert advice.startswith("you can: wait")


@pytest.mark.parametrize(
    "text",
    [
        STOCKOUT,
        json.dumps({"error": {"code": 8, "message": STOCKOUT}}),
        json.dumps({"error": {"code": 429, "message": STOCKOUT, "status": "RESOURCE_EXHAUSTED"}}),
        json.dumps([{"error": {"code": 429, "message": STOCKOUT}}]),
        json.dumps({"code": 8, "message": STOCKOUT}),
        json.dumps({"name": "op", "done": True, "error": {"code": 8, "message": STOCKOUT}}),
        json.dumps(
            {
                "state": {
                    "state": "FAILED",
                    "failedData": {"error": {"code": 8, "message": STOCKOUT}},
                }
            }
        ),
        json.dumps({"error": {"errors": [{"code": "STOCKOUT", "message": STOCKOUT}]}}),
        f"ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: {STOCKOUT}",
        "Create request issued for: [n]\nWaiting for operation [projects/p/…] ...failed.\n"
        "ERROR: (gcloud.compute.tpus.tpu-vm.create) "
        + json.dumps({"code": 8, "message": STOCKOUT}, indent=2),
        f"Error waiting for Creating Vm: Error code 8, message: {STOCKOUT}",
        f'<HttpError 429 when requesting https://tpu.googleapis.com/v2/… returned "{STOCKOUT}">',
        f"google.api_core.exceptions.ResourceExhausted: 429 {STOCKOUT}",
    ],
)
def test_every_form_of_an_answer_is_understood(explain: Explain, text: str) -> None:
    explained = explain.api(text)
    assert (explained["means"], explained["action"]) == ("stockout", "next zone")
    assert "no capacity in us-central2-b" in explained["says"]


@pytest.mark.parametrize(
    ("text", "options", "means", "action"),
    [
        ("", ["--http", "503"], "transient", "later"),
        ("", ["--http", "429"], "rate limit", "later"),
        ("", ["--http", "404"], "transient", "later"),
        ("", ["--status", "unavailable"], "transient", "later"),
        ("<html><title>502 Bad Gateway</title></html>", ["--http", "502"], "transient", "later"),
        ("<html><title>404</title></html>", ["--http", "404"], "transient", "later"),
        ("<html><title>502 Bad Gateway</title></html>", [], "transient", "later"),
        ("INVALID_ARGUMENT: nonsense", [], "invalid", "stop"),
        ("nonsense", ["--http", "400"], "invalid", "stop"),
        ("nonsense", ["--http", "400", "--status", "INTERNAL"], "transient", "later"),
        ("nonsense", [], "transient", "next zone"),
        (b"\xff\xfe\x00{{{[[[", [], "transient", "next zone"),
        ("TPU VM create failed: deadline exceeded", [], "transient", "later"),
        (
            "Resource has been exhausted (e.g. check quota).",
            ["--http", "429"],
            "quota",
            "next zone",
        ),
        ("", ["--status", "RESOURCE_EXHAUSTED"], "stockout", "next zone"),
    ],
)
def test_the_code_decides_if_the_text_does_not(
    explain: Explain, text: str | bytes, options: list[str], means: str, action: str
) -> None:
    explained = explain.api(text, *options)
    assert (explained["means"], explained["action"]) == (means, action)


def test_says_has_the_clouds_message_and_the_fix(explain: Explain) -> None:
    text = "Permission 'tpu.nodes.create' denied on 'projects/p' (or it may not exist)."
    says = explain.api(text, "--http", "403")["says"]
    assert text in says
    assert "roles/tpu.admin" in says


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to explain"),
        (["--api", "--log", "-"], "say what to explain"),
        (["--api"], "there is no answer on stdin"),
        (["--api", "--http", "200"], "--http 200"),
        (["--api", "--http", "7"], "--http 7"),
        (["--api", "--status", "LOST"], "--status LOST: unknown"),
        (["--api", "--exit-code", "1"], "--exit-code belongs to --log"),
        (["--log", "-", "--http", "500"], "--http and --status belong to --api"),
        (["--log", "-"], "the log is empty"),
        (["--log", "/does/not/exist"], "No such file"),
        (["--log", "-", "--exit-code", "0"], "the program succeeded"),
    ],
)
def test_a_mistake_is_one_sentence(explain: Explain, options: list[str], message: str) -> None:
    code, out, err = explain("", *options)
    assert code == 2
    assert not out
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "{}",
        "12",
        "null",
        '{"name": "n", "state": "READY"}',
        '{"name": "o", "done": true, "response": {}}',
    ],
)
def test_an_answer_without_an_error_is_not_explained(explain: Explain, answer: str) -> None:
    code, out, err = explain(answer, "--api")
    assert (code, out) == (2, "")
    assert "reports no error" in err


def test_a_listed_node_that_was_preempted_is_explained(explain: Explain) -> None:
    explained = explain.api('{"name": "n", "state": "PREEMPTED"}')
    assert (explained["means"], explained["action"]) == ("preempted", "another slice")


def test_escape_sequences_do_not_reach_the_terminal(explain: Explain) -> None:
    _, out, _ = explain("\x1b[31mno more capacity\x1b[0m\x07", "--api")
    assert "\x1b" not in out
    assert "\x07" not in out


@pytest.mark.parametrize(
    ("log", "options", "means", "action"),
    [
        (
            'Traceback (most recent call last):\n  File "/a/train.py", line 3, in <module>\n'
            "ValueError: shapes differ\n",
            [],
            "program",
            "count a failure",
        ),
        ("step 1\nF1119 12:00:00 Couldn't open iommu group\n", [], "bad host", "another slice"),
        ("step 7\n", ["--exit-code", "75"], "program", "later"),
    ],
)
def test_a_log_is_explained_by_the_causes_of_the_server(
    explain: Explain, tmp_path: Path, log: str, options: list[str], means: str, action: str
) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    for source, text in ((str(path), ""), ("-", log)):
        code, out, err = explain(text, "--log", source, "--json", *options)
        assert code == 0, err
        explained = json.loads(out)
        assert (explained["means"], explained["action"]) == (means, action)
        assert explained["says"]


def test_a_log_is_judged_by_the_lines_that_the_server_sees(explain: Explain) -> None:
    old = "socket closed\n" + "".join(f"step {n}\n" for n in range(25))
    code, out, _ = explain(old, "--log", "-", "--json")
    assert code == 0
    assert json.loads(out)["says"].startswith("no known error of hosts or of the cloud")


def test_a_log_without_line_breaks_gives_a_short_explanation(explain: Explain) -> None:
    code, out, _ = explain(b"a" * 3_000_000, "--log", "-")
    assert code == 0
    assert len(out) < 2000

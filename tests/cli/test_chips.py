import json
import subprocess
import sys

import pytest

from drumline.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_the_table_ranks_chips_by_their_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chips") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:15]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 15)]
    by_name = {row[1]: row for row in rows}
    assert by_name["A100"][-1] == "100%"
    assert int(by_name["H100"][0]) < int(by_name["v6e"][0])


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chips", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    peaks = [row["peak_bf16_flops"] for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    relative = {row["name"]: row["relative_to_a100"] for row in rows}
    assert relative["v4"] == pytest.approx(275 / 312, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5p-16", {"chips": 8, "hosts": 2, "cores": 16}),
        ("v5litepod-8", {"chips": 8, "hosts": 1, "chips_per_host": 8}),
        ("v5litepod-16", {"chips": 16, "hosts": 4, "cores": 16}),
        ("v6e-256", {"wraps": [True, True]}),
        ("v6e-64", {"wraps": [False, False], "peak_bf16_flops": 64 * 9.2e14}),
        ("v4-128", {"chips": 64, "hosts": 16, "topology": [4, 4, 4], "zones": ["us-central2-b"]}),
        ("v4-128", {"hbm_bytes": 64 * 32 * 10**9, "wraps": [True] * 3}),
    ],
)
def test_a_slice_as_json(
    name: str, expected: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chips", name, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {key: facts[key] for key in expected} == expected


def test_the_8_bit_peak_of_earlier_versions_stays_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("chips", "--json") == 0
    peaks = {row["name"]: row["peak_8bit_flops"] for row in json.loads(capsys.readouterr().out)}
    assert (peaks["v5p"], peaks["7x"], peaks["v3"]) == (9.18e14, 4.61e15, None)


def test_a_slice_lists_its_zones_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chips", "v4-8") == 0
    out = capsys.readouterr().out
    assert "1 host with 4 chips" in out
    assert "us-central2-b" in out
    assert "$12.88" in out


def test_a_chip_lists_its_sources_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chips", "v3") == 0
    out = capsys.readouterr().out
    assert "SOURCE" in out
    assert "one core's share" in out


@pytest.mark.parametrize("typed", ["v5p-12", "", "v4-x", "nvidia", "h100-8", "v4-8\nv4-16"])
def test_an_unknown_name_is_one_line_and_exit_code_2(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chips", typed) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["chips"], ["chips", "v4-8", "--json"]])
def test_no_heavy_library_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from drumline.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'httpx', 'asyncssh', 'google', 'rich', 'pydantic', 'starlette'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

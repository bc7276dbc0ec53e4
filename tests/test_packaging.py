"""The help of the Makefile, the files of the wheel, and its description on an index."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    command = ["make", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split() for line in shown.stdout.splitlines() if line.startswith("  make ")]
    assert targets <= {words[1] for words in listed if len(words) > 2}


def test_a_package_index_can_describe_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"jax", "tpu"} <= set(project["keywords"])
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert versions <= set(project["classifiers"])
    assert project["classifiers"] == sorted(project["classifiers"])
    assert project["description"]
    assert project["authors"]


def test_every_classifier_is_known_to_package_indexes() -> None:
    known = pytest.importorskip("trove_classifiers").classifiers
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["classifiers"]) <= known


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"])
def test_relative_links_name_files_and_headings(page: str) -> None:
    path = ROOT / page
    broken = {
        f"{file.name}: {link}"
        for file in ([path] if path.is_file() else path.glob("*.md"))
        for link in relative_links(file.read_text(encoding="utf-8"))
        if not resolves(file, link)
    }
    assert not broken


def relative_links(text: str) -> list[str]:
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    without_code = re.sub(r"`[^`\n]*`", "code", without_code)
    return re.findall(r"\[[^\]]*\]\((?!\w+:)([^)\s]+)\)", without_code)


def resolves(file: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = file.parent / name if name else file
    return target.exists() and (not heading or heading in anchors(target.read_text()))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_the_description_on_an_index_has_no_relative_link(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    assert "pip install 'drumline[jax]'" in metadata
    assert "[Jobs](" not in metadata
    assert not relative_links(metadata)


def test_a_known_source_makes_the_links_absolute() -> None:
    pytest.importorskip("hatchling")
    describe = runpy.run_path(str(ROOT / "hatch_build.py"))["describe"]
    readme = "[Jobs](docs/jobs.md#keys), [Python](https://python.org)"
    assert describe(readme, "https://source.example/drumline/blob/main/") == (
        "[Jobs](https://source.example/drumline/blob/main/docs/jobs.md#keys),"
        " [Python](https://python.org)"
    )
    assert describe(readme, None) == "Jobs, [Python](https://python.org)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package of the wheel, as pip unpacks it."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(folder)  # noqa: S202 - the wheel of this checkout
    return folder


def build(source: Path, into: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


def run_installed(installed: Path, folder: Path, *words: str) -> str:
    """Run the command line of the unpacked wheel in a folder. It must succeed."""
    return subprocess.run(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "DRUMLINE_HOME": str(folder / "home")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_module_page_and_example_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "drumline").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    pages = {f"drumline/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert {"drumline/example/train.py", "drumline/example/job.yaml"} <= source
    assert {name for name in names_in(wheel) if ".dist-info/" not in name} == source | pages


def test_a_wheel_from_the_source_distribution_has_the_same_files(
    built: Path, tmp_path: Path
) -> None:
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    build(folder, tmp_path / "dist")
    [wheel], [again] = built.glob("*.whl"), (tmp_path / "dist").glob("*.whl")
    assert names_in(again) == names_in(wheel)


def test_the_wheel_prints_its_pages_and_writes_the_example(installed: Path, tmp_path: Path) -> None:
    assert run_installed(installed, tmp_path, "docs", "jobs").startswith("# Jobs\n")
    run_installed(installed, tmp_path, "init", "--example")
    written = (tmp_path / "example" / "train.py").read_text()
    assert written == (ROOT / "src" / "drumline" / "example" / "train.py").read_text()

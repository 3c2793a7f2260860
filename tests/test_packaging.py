"""The package description, the pinned versions and the Makefile agree with what is there."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUB_PACKAGES = ("kernels", "passes", "runtime")


def dependencies() -> list[Requirement]:
    project = PROJECT["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    return [Requirement(text) for text in listed if not text.startswith(project["name"])]


def pinned() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def test_every_folder_with_code_is_packaged():
    folders = {
        f"chunkc.{file.parent.relative_to(ROOT / 'chunkc')}" for file in (ROOT / "chunkc").rglob("*/__init__.py")
    }
    for name in SUB_PACKAGES:
        for file in (ROOT / name).rglob("__init__.py"):
            folders.add("chunkc." + ".".join(file.parent.relative_to(ROOT).parts))
    assert {"chunkc", *folders} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_source_file_of_the_kernels_is_packaged():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["chunkc.kernels"]
    for file in (ROOT / "kernels").iterdir():
        if file.is_file() and file.suffix != ".py":
            assert any(file.match(pattern) for pattern in patterns), file.name


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_dependency_is_pinned_once_to_a_version_it_allows(python):
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_system": "Linux"}
    versions: dict[str, str] = {}
    for requirement in pinned():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{name} is pinned twice"
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", str(requirement)
            versions[name] = specifier.version
    for requirement in dependencies():
        if canonicalize_name(requirement.name) == "triton":
            continue  # builds of torch demand their own
        assert canonicalize_name(requirement.name) in versions, f"{requirement} is not pinned in constraints.txt"
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)


def test_the_version_is_the_packages():
    import chunkc

    assert PROJECT["project"]["version"] == chunkc.__version__
    assert f"## {chunkc.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def make(tmp_path: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """`make` of an environment in a temporary folder; every call must end before it installs anything."""
    command = ["make", "-C", str(ROOT), f"{tmp_path}/venv/.ready", f"VENV={tmp_path}/venv", *variables]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def python_that(tmp_path: Path, fails_at: str) -> Path:
    """An interpreter that is ours, but fails at commands that contain a word."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncase "$2" in *{fails_at}*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "missing, said",
    [
        ("version_info", "chunkc needs Python 3.10 to 3.13, and .* is another one"),
        ("ensurepip", "has no venv module: install it"),
        ("Python.h", "The C headers of .* are missing"),
        (None, r"No C\+\+ compiler was found \(no-such-compiler\)"),
    ],
)
def test_make_says_what_is_missing_in_one_sentence(tmp_path, missing, said):
    python = python_that(tmp_path, missing or "nothing-like-this")
    done = make(tmp_path, f"PYTHON={python}", "CXX=no-such-compiler")
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[0]
    assert re.search(said, sentence) and sentence.endswith(".")
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_without_any_python_says_so(tmp_path):
    done = make(tmp_path, "PYTHON=")
    assert done.returncode == 2
    assert "none was found" in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("chunkc", *SUB_PACKAGES):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(pip, check=True)

    packaged = {file.relative_to(site / "chunkc") for file in (site / "chunkc").rglob("*") if file.is_file()}
    expected = {file.relative_to(source / "chunkc") for file in (source / "chunkc").rglob("*") if file.is_file()}
    for name in SUB_PACKAGES:
        expected |= {file.relative_to(source) for file in (source / name).rglob("*") if file.is_file()}
    assert {path for path in packaged if path.suffix != ".pyc"} == expected

    # Also from the clone's own folder, where `chunkc/` comes first on the path. -S: no editable install.
    for folder in (tmp_path, source):
        command = [sys.executable, "-S", "-c", "import chunkc.kernels, chunkc.passes, chunkc.runtime"]
        subprocess.run(command, check=True, cwd=folder, env={"PYTHONPATH": str(site)})

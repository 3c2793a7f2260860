"""Native libraries: failed builds and folders are told, damage is repaired, and what is kept needs no compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import libraries, native
from chunkc.kernels.native import NativeLibrary


@pytest.fixture(
    params=[libraries.ATTENTION[torch.float32], libraries.LINEAR[torch.bfloat16], libraries.PLANNER],
    ids=lambda library: library.name,
)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return request.param


def test_a_failing_build_says_what_failed(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("CHUNKC_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ChunkcError, match=rf"{library.name} \(exit status 3(.|\n)*out of luck"):
        library.find_or_build()
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == ["lock"]


def test_a_folder_that_cannot_be_written_says_so(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHUNKC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ChunkcError, match="CHUNKC_CACHE_DIR"):
        library.find_or_build()


def test_a_kept_library_needs_no_compiler(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library.find_or_build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert built is not None and library.is_built() and library.find_or_build() == built


def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_CACHE_DIR", str(tmp_path))
    assert not libraries.PLANNER.is_built()
    built = libraries.PLANNER.find_or_build()
    assert built is not None
    whole = built.read_bytes()
    for damage in (b"", whole[:5000], whole[:-1] + b"x"):
        built.write_bytes(damage)
        assert libraries.PLANNER.find_or_build() == built
        assert built.read_bytes() != damage


EVERY = [
    library
    for value in vars(libraries).values()
    for library in (value.values() if isinstance(value, dict) else [value])
    if isinstance(library, NativeLibrary)
]


@pytest.mark.parametrize("library", EVERY, ids=lambda library: library.name)
def test_a_library_names_all_it_includes(library: NativeLibrary) -> None:
    """What is not named would not be in the key, and an old library would be taken for the new one."""
    folder = Path(native.__file__).parent
    included, todo = set(), [library.sources[0]]
    while todo:
        name = todo.pop()
        included.add(name)
        lines = (folder / name).read_text().splitlines()
        todo += [line.split('"')[1] for line in lines if line.startswith('#include "')]
    assert included == set(library.sources)

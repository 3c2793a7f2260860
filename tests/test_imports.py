"""Imports go one way: kernels <- passes <- runtime <- the rest of chunkc <- bench. Importing is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import chunkc

ROOT = Path(__file__).parent.parent
LAYERS = {"kernels": 0, "passes": 1, "runtime": 2, "": 3, "bench": 4}  # "" is chunkc/ itself
LEAVES = {"errors": set(), "config": {"errors"}, "compat": set(), "dtypes": set()}  # leaf -> the leaves it may import


def source_files() -> Iterator[tuple[str, Path]]:
    """(layer, file) of every module of the package."""
    for folder in ("kernels", "passes", "runtime"):
        yield from ((folder, file) for file in sorted((ROOT / folder).rglob("*.py")))
    for file in sorted((ROOT / "chunkc").rglob("*.py")):
        yield ("bench" if file.parent.name == "bench" else ""), file


def imported_modules(file: Path) -> Iterator[tuple[str, int]]:
    """(module path below chunkc, line) of every import of chunkc in a file, in functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            # `from chunkc import x` may name a module or a public name
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name.partition(".")[2], node.lineno) for name in names if name.split(".")[0] == "chunkc")


def layer_of(module: str) -> str:
    first = module.split(".")[0]
    return first if first in LAYERS else ""


FILES = [pytest.param(layer, file, id=str(file.relative_to(ROOT))) for layer, file in source_files()]


@pytest.mark.parametrize("layer, file", FILES)
def test_imports_go_one_way(layer, file):
    if file == ROOT / "chunkc" / "__init__.py":  # resolves the public names, lazily
        return
    leaf = file.stem if layer == "" else None
    for module, line in imported_modules(file):
        target = module.split(".")[0]
        if leaf in LEAVES:
            assert target in LEAVES[leaf], f"{file.name}:{line}: the leaf {leaf} imports chunkc.{module}"
        elif target not in LEAVES:
            assert LAYERS[layer_of(module)] <= LAYERS[layer], f"{file.name}:{line} imports chunkc.{module}"


@pytest.mark.parametrize("layer, file", FILES)
def test_no_generic_top_level_name_is_imported(layer, file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] not in ("kernels", "passes", "runtime", "tests"), f"{file}:{node.lineno}"


def modules_after(statement: str) -> set[str]:
    """Top-level modules that are loaded in a new interpreter after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import chunkc",
        "import chunkc.errors",
        "from chunkc import SamplingParams, UnsupportedModelError",
        "import chunkc.models",
        "import chunkc.bench.__main__, chunkc.bench.serve",
        "import chunkc.kernels, chunkc.passes, chunkc.runtime",
    ],
)
def test_importing_pulls_in_nothing_heavy(statement):
    assert not modules_after(statement) & {"torch", "transformers", "numpy", "triton", "networkx"}


def test_importing_chunkc_alone_imports_only_the_standard_library():
    assert modules_after("import chunkc") - modules_after("pass") - sys.stdlib_module_names <= {"chunkc"}


def test_every_public_name_resolves():
    for name in chunkc.__all__:
        assert getattr(chunkc, name) is not None
        assert name in dir(chunkc)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        chunkc.nonesuch  # noqa: B018

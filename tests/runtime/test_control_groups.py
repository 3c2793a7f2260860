"""Limits of control groups are found where the kernel writes them, in both versions, in and around containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkc.runtime.cache_size import available_memory
from chunkc.runtime.control_groups import cpu_quota, memory_left


def make(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A mount with these files, and what the process says of its groups."""
    mount, groups = root / "mount", root / "own"
    mount.mkdir()
    groups.write_text(own)
    for name, text in files.items():
        file = mount / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return mount, groups


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),  # a group around ours
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/../other\n", {"cpu.max": "300000 100000"}, 3.0),  # seen from inside of a container
        ("0::/a\n", {"b/cpu.max": "100000 100000"}, None),  # not ours
        ("0::/\n", {"cpu.max": ""}, None),
        ("2:cpu,cpuacct:/d\n0::/\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, None),
        ("2:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"}, 4.0),
        ("2:cpu,cpuacct:/on/host\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000"}, 0.5),
        ("3:cpuset:/d\n", {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quota(tmp_path, own, files, expected):
    assert cpu_quota(*make(tmp_path, own, files)) == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "5"}, None),
        ("0::/a\n", {"a/memory.max": "100", "a/memory.current": "30"}, 70),
        (
            "0::/a\n",
            {"a/memory.max": "100", "a/memory.current": "90", "a/memory.stat": "anon 30\nfile 60\ninactive_file 50\n"},
            60,
        ),
        ("0::/a\n", {"a/memory.max": "100", "a/memory.current": "120"}, 0),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "100",
                "a/memory.current": "90",
                "a/b/memory.max": "60",
                "a/b/memory.current": "20",
            },
            10,
        ),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "100",
                "memory/a/memory.usage_in_bytes": "50",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 7",
            },
            57,
        ),
    ],
)
def test_memory(tmp_path, own, files, expected):
    assert memory_left(*make(tmp_path, own, files)) == expected


def test_where_there_are_no_control_groups(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path / "neither") is None
    assert memory_left(tmp_path / "none", tmp_path / "neither") is None


def test_of_this_machine():
    assert available_memory() > 0

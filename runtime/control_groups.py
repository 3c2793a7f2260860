"""What the control groups of this process leave it: of the cores' time, and of the memory.

A container, a batch system or a service manager sets such limits, on the group that a process is in or on one around
it; neither torch nor OpenMP knows them. Both versions of the interface are read (``Documentation/admin-guide`` of the
Linux kernel, ``cgroup-v2.rst`` and ``cgroup-v1``). Where there is none, nothing is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quota(mount: Path = _MOUNT, own: Path = _OWN) -> float | None:
    """How many cores' time this process may use, as a number of cores, or None for no limit.

    Args:
        mount: where the groups are files.
        own: file that says which groups the process is in.
    """
    quotas = []
    for folder in _groups("cpu", mount, own):
        one = _words(folder / "cpu.max")  # version 2: quota and period
        if len(one) != 2:
            one = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(one) == 2 and all(word.isdigit() for word in one) and int(one[1]) > 0:  # else "max" or -1
            quotas.append(int(one[0]) / int(one[1]))
    return min(quotas, default=None)


def memory_left(mount: Path = _MOUNT, own: Path = _OWN) -> int | None:
    """Bytes this process may still take within the limits of its groups, or None for no limit.

    What its groups hold of files that nobody uses at present does not count: the system takes that back first.
    """
    left = []
    for folder in _groups("memory", mount, own):
        for limit_file, used_file, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            numbers = _words(folder / limit_file) + _words(folder / used_file)
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                words = _words(folder / "memory.stat")
                counts = dict(zip(words[::2], words[1::2], strict=False))
                left.append(max(0, int(numbers[0]) - int(numbers[1]) + int(counts.get(idle, 0))))
    return min(left, default=None)


def _groups(controller: str, mount: Path, own: Path) -> Iterator[Path]:
    """Folders of the groups that a controller's limits may be in: the process's own, and all around it.

    A group's name is as the host sees it; in a container its files may lie at the mount itself.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    found = {mount: None, mount / controller: None}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        found |= {base / part: None for part in (inner, *inner.parents) if ".." not in part.parts}
    yield from found


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []

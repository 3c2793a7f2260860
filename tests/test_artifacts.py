"""The cache on disk: what is stored is found, and nothing else: not halves, not damage, not what others wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from chunkc import artifacts, cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(artifacts, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def stored(key: str = "k", data: bytes = b"data") -> artifacts.Entry:
    entry = artifacts.store("graph", key, {"graph.so": data}, {"nodes": 3})
    assert entry is not None
    return entry


def test_what_is_stored_is_found(tmp_path):
    (tmp_path / "file").write_bytes(b"from a file")
    artifacts.store("graph", "k", {"a": tmp_path / "file", "b": b"bytes"}, {"nodes": 3})
    entry = artifacts.find("graph", "k")
    assert (entry.folder / "a").read_bytes() == b"from a file"
    assert (entry.folder / "b").read_bytes() == b"bytes"
    assert entry.facts == {"nodes": 3}
    assert artifacts.find("graph", "other") is None
    assert artifacts.find("model", "k") is None


def test_keys_tell_their_parts_apart():
    keys = [artifacts.key_of(*parts) for parts in [("a", "b"), ("ab",), ("a", "b", ""), ("", "ab"), (b"a", "b\0")]]
    assert len(set(keys)) == len(keys)


def flip(folder: Path) -> None:
    (folder / "graph.so").write_bytes(b"dat4")


def shorten(folder: Path) -> None:
    (folder / "graph.so").write_bytes(b"")


def lose(folder: Path) -> None:
    (folder / "graph.so").unlink()


def break_index(folder: Path) -> None:
    (folder / "entry.json").write_text("{")


def index_of_another_shape(folder: Path) -> None:
    (folder / "entry.json").write_text("[1]")


def index_of_another_key(folder: Path) -> None:
    index = json.loads((folder / "entry.json").read_text())
    (folder / "entry.json").write_text(json.dumps({**index, "key": "other"}))


def open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize(
    "harm", [flip, shorten, lose, break_index, index_of_another_shape, index_of_another_key, open_to_others]
)
def test_a_damaged_or_foreign_entry_is_said_and_made_again(harm):
    harm(stored().folder)
    with pytest.warns(RuntimeWarning, match="it is made again") as warned:
        assert artifacts.find("graph", "k") is None
    assert len(warned) == 1
    assert artifacts.find("graph", "k") is None  # without another word
    assert stored().facts == {"nodes": 3}


def test_somebody_elses_entry_is_not_used(monkeypatch):
    stored()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match="open to others"):
        assert artifacts.find("graph", "k") is None


def test_what_is_there_stays_when_it_is_stored_again(folder):
    stored(data=b"first")
    assert (stored(data=b"second").folder / "graph.so").read_bytes() == b"first"
    assert [path.name for path in folder.iterdir()] == ["graph-k"]  # nothing is left lying about


def same_file(first: artifacts.Entry, second: artifacts.Entry) -> bool:
    return (first.folder / "graph.so").samefile(second.folder / "graph.so")


def test_twins_share_their_files_until_one_is_deleted():
    first = stored("a", b"shared")
    second = artifacts.store("graph", "b", {"graph.so": b"shared"}, {}, twin=first)
    assert same_file(first, second)
    artifacts.remove(first)
    assert (artifacts.find("graph", "b").folder / "graph.so").read_bytes() == b"shared"


@pytest.mark.parametrize("harm", [flip, shorten, lose])
def test_a_twin_of_other_contents_is_no_twin(harm):
    first = stored("a", b"data")
    harm(first.folder)
    second = artifacts.store("graph", "b", {"graph.so": b"data"}, {}, twin=first)
    assert (second.folder / "graph.so").read_bytes() == b"data"
    with pytest.warns(RuntimeWarning, match="it is made again"):
        assert artifacts.find("graph", "a") is None


def test_where_there_are_no_links_twins_have_copies(monkeypatch):
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    first = stored("a", b"shared")
    second = artifacts.store("graph", "b", {"graph.so": b"shared"}, {}, twin=first)
    assert not same_file(first, second)
    assert (second.folder / "graph.so").read_bytes() == b"shared"


def test_a_folder_that_cannot_be_written_is_said(folder):
    folder.write_text("a file")
    with pytest.warns(RuntimeWarning, match="CHUNKC_CACHE_DIR"):
        assert artifacts.store("graph", "k", {"graph.so": b""}, {}) is None


def test_the_ones_used_longest_ago_go_first(monkeypatch):
    for age, key in enumerate("abcd"):
        entry = stored(key, bytes(1000))
        os.utime(entry.folder, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(artifacts, "DEFAULT_LIMIT", 3500)
    assert artifacts.find("graph", "d") is not None  # d is used now
    stored("e", bytes(1000))
    kept = {folder.name for folder, _, _ in artifacts.entries()}
    assert {"graph-d", "graph-e"} <= kept and "graph-c" not in kept


def test_processes_at_once_never_see_half_an_entry(tmp_path):
    """Four processes store and delete the same entry over and over."""
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        results = pool.starmap(store_and_read, [(str(tmp_path / "shared"), "k")] * 4)
    assert results == [0] * 4


def store_and_read(cache_dir: str, key: str) -> int:
    artifacts.cache_dir = lambda: Path(cache_dir)
    failures = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another process may delete an entry while it is looked at
        for _ in range(50):
            entry = artifacts.store("graph", key, {"graph.so": key.encode() * 10000}, {})
            if entry is None:
                continue
            try:
                failures += (entry.folder / "graph.so").read_bytes() != key.encode() * 10000
            except FileNotFoundError:
                continue
            artifacts.remove(entry)
    return failures


def test_the_command_lists_and_clears(capsys):
    stored("a"), stored("b")
    assert cache.main([]) == 0
    listed = capsys.readouterr().out
    assert "graph-a" in listed and "graph-b" in listed and "MiB in" in listed
    assert cache.main(["clear"]) == 0
    assert "deleted 2 entries" in capsys.readouterr().out
    assert artifacts.entries() == []
    assert cache.main(["list"]) == 0
    assert "no entries" in capsys.readouterr().out

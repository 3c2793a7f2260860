"""The planner: every (row, visible key) pair in exactly one task, and nothing else."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.kernels.device import H100, DeviceModel
from chunkc.kernels.tasks import AttentionShape, Merge, Task, TaskTable, plain_plan, plan_tasks, row_block

FREE_TASKS = dataclasses.replace(H100, task_overhead=0.0)  # cuts wherever that helps at all
DEAR_TASKS = dataclasses.replace(H100, task_overhead=1e-3)  # and hardly ever


def offsets(q_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *q_lens]).cumsum(0).int()


def rows_of(table: TaskTable) -> tuple[list[Task], list[Merge]]:
    return [Task._make(t) for t in table.tasks.tolist()], [Merge._make(m) for m in table.merges.tolist()]


def visible(positions: np.ndarray, num_keys: int, shape: AttentionShape) -> np.ndarray:
    """bool ``[len(positions), num_keys]``"""
    position, key = positions[:, None], np.arange(num_keys)[None, :]
    sees = key <= position
    if shape.window:
        sees &= position - key < shape.window
    if shape.chunk:
        sees &= position // shape.chunk == key // shape.chunk
    return sees


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], AttentionShape, dict]:
    requests = draw(st.integers(1, 6))
    q_lens = [draw(st.sampled_from([0, 1, 1, 1, 2, 5, 17, 40, 130])) for _ in range(requests)]
    kv_lens = [q + draw(st.sampled_from([0, 1, 15, 90, 700])) for q in q_lens]
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    shape = AttentionShape(
        kv_heads * group,
        kv_heads,
        16,
        16,
        window=draw(st.sampled_from([0, 0, 1, 7, 50])),
        chunk=draw(st.sampled_from([0, 0, 1, 9, 32])),
    )
    options = {
        "page_size": draw(st.sampled_from([1, 3, 16, 128])),
        "units": draw(st.sampled_from([1, 2, 6, 132])),
        "q_block": draw(st.sampled_from([None, None, 1, 4, 16, 64])),
        "kv_split": draw(st.sampled_from([None, None, 1, 8, 16, 33])),
        "device": draw(st.sampled_from([None, FREE_TASKS, DEAR_TASKS])),
    }
    return q_lens, kv_lens, shape, options


@settings(max_examples=150)
@given(plans())
def test_plan_covers_every_visible_pair_exactly_once(plan: tuple) -> None:
    q_lens, kv_lens, shape, options = plan
    table = plan_tasks(offsets(q_lens), torch.tensor(kv_lens).int(), shape, **options)
    check_plan(table, q_lens, kv_lens, shape, **options)


@settings(max_examples=50)
@given(plans())
def test_so_does_the_plain_plan(plan: tuple) -> None:
    q_lens, kv_lens, shape, options = plan
    options = {name: options[name] for name in ("page_size", "q_block", "kv_split")}
    table = plain_plan(offsets(q_lens), torch.tensor(kv_lens).int(), shape, **options)
    check_plan(table, q_lens, kv_lens, shape, **options)


def check_plan(
    table: TaskTable,
    q_lens: list[int],
    kv_lens: list[int],
    shape: AttentionShape,
    *,
    page_size: int,
    q_block: int | None,
    kv_split: int | None,
    units: int | None = None,
    device: DeviceModel | None = None,
) -> None:
    tasks, merges = rows_of(table)
    group, align = shape.group, min(page_size, 64)
    covered = [
        np.zeros((shape.num_kv_heads, q * group, kv), dtype=np.int32) for q, kv in zip(q_lens, kv_lens, strict=True)
    ]
    seen = [visible(kv - q + np.arange(q * group) // group, kv, shape) for q, kv in zip(q_lens, kv_lens, strict=True)]
    blocks: dict[int, set[tuple[int, int, int]]] = {r: set() for r in range(len(q_lens))}
    for task in tasks:
        assert 0 <= task.row_begin < task.row_end <= q_lens[task.request] * group
        assert 0 <= task.kv_begin < task.kv_end <= kv_lens[task.request]
        covered[task.request][task.kv_head, task.row_begin : task.row_end, task.kv_begin : task.kv_end] += 1
        blocks[task.request].add((task.kv_head, task.row_begin, task.row_end))
        # Nothing to skip: each end of the key range is seen by some row.
        sees = seen[task.request][task.row_begin : task.row_end]
        assert sees[:, task.kv_begin].any() and sees[:, task.kv_end - 1].any()
        if kv_split:
            assert task.kv_end - task.kv_begin <= -(-kv_split // align) * align

    for r, times in enumerate(covered):
        assert times.max(initial=0) <= 1
        assert (times[:, seen[r]] == 1).all()
    for r, found in blocks.items():
        sizes = {end - begin for _, begin, end in found}
        if not sizes:
            continue
        block = max(sizes)  # one size, but for the last of a request
        assert q_block is None or block <= row_block(shape, q_block)
        expected = {
            (head, begin, min(begin + block, q_lens[r] * group))
            for head in range(shape.num_kv_heads)
            for begin in range(0, q_lens[r] * group, block)
        }
        assert found == expected
        if block < q_lens[r] * group and block >= group:
            assert block % group == 0, "a block holds whole tokens"
    check_merges(tasks, merges, align)


def check_merges(tasks: list[Task], merges: list[Merge], align: int = 1) -> None:
    """Each partial belongs to one merge, in the order of the keys, cut at multiples of ``align``; no two share scratch
    rows, and no scratch row is left out."""
    pieces_of: dict[int, list[Task]] = {index: [] for index in range(len(merges))}
    for task in tasks:
        assert (task.partial < 0) == (task.merge < 0)
        if task.merge >= 0:
            pieces_of[task.merge].append(task)
    scratch: list[tuple[int, int]] = []
    for index, merge in enumerate(merges):
        rows = merge.row_end - merge.row_begin
        pieces = sorted(pieces_of[index], key=lambda piece: piece.partial)
        assert merge.num_splits == len(pieces) >= 2
        for s, piece in enumerate(pieces):
            assert piece[:4] == merge[:4]
            assert piece.partial == merge.partial + s * rows
            assert s == 0 or (piece.kv_begin == pieces[s - 1].kv_end and piece.kv_begin % align == 0)
            scratch.append((piece.partial, piece.partial + rows))
    scratch.sort()
    assert [begin for begin, _ in scratch] == [0, *(end for _, end in scratch)][: len(scratch)]


def test_tables_are_int32_rows_of_eight_even_when_empty() -> None:
    table = plan_tasks(offsets([0]), torch.tensor([5]).int(), AttentionShape(2, 1, 8, 8), page_size=4, units=2)
    for part in (table.tasks, table.merges):
        assert part.dtype == torch.int32 and part.shape == (0, 8) and part.is_contiguous()


@pytest.mark.parametrize("units", [1, 2, 4, 12])
def test_the_heads_of_a_decode_stand_side_by_side(units: int) -> None:
    """As their keys lie in a page: a body may read them in one go."""
    shape = AttentionShape(16, 8, 64, 64)
    tasks, _ = rows_of(plan_tasks(offsets([1] * 24), torch.full((24,), 512).int(), shape, page_size=16, units=units))
    bundles = [tasks[i : i + 8] for i in range(0, len(tasks), 8)]
    assert len(tasks) == 24 * 8
    assert all([t.kv_head for t in b] == list(range(8)) and len({t.request for t in b}) == 1 for b in bundles)


def test_padding_rows_without_keys_have_no_task() -> None:
    shape = AttentionShape(2, 1, 8, 8)
    tasks, _ = rows_of(plan_tasks(offsets([1, 1]), torch.tensor([0, 3]).int(), shape, page_size=4, units=2))
    assert [t.request for t in tasks] == [1]


@pytest.mark.parametrize("group", [1, 3, 4, 7, 80])
def test_a_block_holds_whole_tokens_unless_one_token_is_larger(group: int) -> None:
    block = row_block(AttentionShape(group, 1, 8, 8), 64)
    assert block <= 64
    assert block % group == 0 if group <= 64 else block == 64


@pytest.mark.parametrize(
    "bad",
    [{"page_size": 0}, {"units": 0}, {"q_block": 0}, {"kv_split": 0}],
)
def test_impossible_options_are_refused(bad: dict) -> None:
    options = {"page_size": 16, "units": 2, **bad}
    with pytest.raises(ValueError, match=next(iter(bad))):
        plan_tasks(offsets([1]), torch.tensor([1]).int(), AttentionShape(1, 1, 8, 8), **options)


@pytest.mark.parametrize("heads", [(3, 2, 8, 8), (0, 1, 8, 8), (2, 1, 8, 8, -1)])
def test_impossible_shapes_are_refused(heads: tuple) -> None:
    with pytest.raises(ValueError):
        AttentionShape(*heads)


def test_a_batch_and_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        plan_tasks(offsets([1, 1]), torch.tensor([1]).int(), AttentionShape(1, 1, 8, 8), page_size=4, units=1)


def test_numbers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        plan_tasks(offsets([1]), torch.tensor([2**32 + 5]), AttentionShape(2, 1, 8, 8), page_size=16, units=2)


def test_other_integers_and_strides_mean_the_same() -> None:
    shape, lens = AttentionShape(4, 2, 16, 16), torch.tensor([9, 700])
    wide = torch.stack([offsets([3, 1]), offsets([7, 7])], dim=1)
    plain = plan_tasks(offsets([3, 1]), lens.int(), shape, page_size=16, units=8)
    other = plan_tasks(wide[:, 0], lens, shape, page_size=16, units=8)
    assert other.tasks.equal(plain.tasks) and other.merges.equal(plain.merges)


def test_a_full_batch_of_padding_and_requests_without_new_tokens() -> None:
    q_lens, kv_lens = [1, 0] * 2048, [0, 5000] * 2048
    q_lens[-1], kv_lens[-1] = 1, 31
    table = plan_tasks(
        offsets(q_lens), torch.tensor(kv_lens).int(), AttentionShape(4, 2, 16, 16), page_size=16, units=2
    )
    assert set(table.tasks[:, 0].tolist()) == {4095}


def test_lengths_up_to_the_largest_int32() -> None:
    most = 2**31 - 1
    shape = AttentionShape(4, 1, 16, 16)
    tasks, merges = rows_of(plan_tasks(offsets([2]), torch.tensor([most]), shape, page_size=512, units=132))
    check_merges(tasks, merges)
    assert len(merges) == 1 and len(tasks) >= 132
    assert (min(t.kv_begin for t in tasks), max(t.kv_end for t in tasks)) == (0, most)


def test_threads_that_plan_at_once_do_not_mix_their_plans() -> None:
    shape = AttentionShape(9, 3, 64, 64)
    batches = [(offsets([1] * n), torch.full((n,), 300 * n).int()) for n in (3, 50, 111, 200)]
    options = {"page_size": 16, "units": 132, "device": H100}
    expected = [plan_tasks(*batch, shape, **options) for batch in batches]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            table = plan_tasks(*batches[index], shape, **options)
            if not (table.tasks.equal(expected[index].tasks) and table.merges.equal(expected[index].merges)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

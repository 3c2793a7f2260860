"""The planner: every (row, visible key) pair in exactly one task, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.kernels.tasks import AttentionShape, Merge, Task, TaskTable, plan_tasks, row_block


def offsets(q_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *q_lens]).cumsum(0).int()


def rows_of(table: TaskTable) -> tuple[list[Task], list[Merge]]:
    return [Task._make(t) for t in table.tasks.tolist()], [Merge._make(m) for m in table.merges.tolist()]


def visible(position: int, key: int, shape: AttentionShape) -> bool:
    return (
        key <= position
        and (not shape.window or position - key < shape.window)
        and (not shape.chunk or position // shape.chunk == key // shape.chunk)
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], AttentionShape, dict]:
    requests = draw(st.integers(1, 5))
    q_lens = [draw(st.sampled_from([0, 1, 1, 1, 2, 5, 17, 40])) for _ in range(requests)]
    kv_lens = [q + draw(st.integers(0, 90)) for q in q_lens]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
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
        "units": draw(st.sampled_from([1, 2, 132])),
        "q_block": draw(st.sampled_from([None, 1, 4, 16, 64])),
        "kv_split": draw(st.sampled_from([None, 1, 8, 16, 33])),
    }
    return q_lens, kv_lens, shape, options


@settings(max_examples=150, deadline=None)
@given(plans())
def test_plan_covers_every_visible_pair_exactly_once(plan: tuple) -> None:
    q_lens, kv_lens, shape, options = plan
    tasks, merges = rows_of(plan_tasks(offsets(q_lens), torch.tensor(kv_lens).int(), shape, **options))
    group, block = shape.group, row_block(shape, options["q_block"])

    covered: dict[tuple[int, int], torch.Tensor] = {
        (r, h): torch.zeros(q_lens[r] * group, kv_lens[r], dtype=torch.int32)
        for r in range(len(q_lens))
        for h in range(shape.num_kv_heads)
    }
    blocks: dict[tuple[int, int], set[tuple[int, int]]] = {key: set() for key in covered}
    for task in tasks:
        assert 0 <= task.row_begin < task.row_end <= q_lens[task.request] * group
        assert 0 <= task.kv_begin < task.kv_end <= kv_lens[task.request]
        assert task.row_end - task.row_begin <= block
        covered[task.request, task.kv_head][task.row_begin : task.row_end, task.kv_begin : task.kv_end] += 1
        blocks[task.request, task.kv_head].add((task.row_begin, task.row_end))
        # Nothing to skip: each end of the key range is seen by some row.
        first = kv_lens[task.request] - q_lens[task.request]
        positions = [first + row // group for row in range(task.row_begin, task.row_end)]
        assert any(visible(p, task.kv_begin, shape) for p in positions)
        assert any(visible(p, task.kv_end - 1, shape) for p in positions)
        if options["kv_split"]:
            align = min(options["page_size"], 64)
            assert task.kv_end - task.kv_begin <= -(-options["kv_split"] // align) * align

    for (r, _), times in covered.items():
        first = kv_lens[r] - q_lens[r]
        assert times.max() <= 1 if times.numel() else True
        for row in range(q_lens[r] * group):
            sees = [visible(first + row // group, key, shape) for key in range(kv_lens[r])]
            assert times[row][torch.tensor(sees, dtype=torch.bool)].eq(1).all()
    for (r, _), found in blocks.items():
        assert len(found) == -(-q_lens[r] * group // block)
        if block % group == 0:
            assert all(begin % group == 0 for begin, _ in found)

    check_merges(tasks, merges)


def check_merges(tasks: list[Task], merges: list[Merge]) -> None:
    """Each partial belongs to one merge, in the order of the keys, and no two share scratch rows."""
    used: set[int] = set()
    for index, merge in enumerate(merges):
        rows = merge.row_end - merge.row_begin
        pieces = sorted((t for t in tasks if t.merge == index), key=lambda t: t.partial)
        assert merge.num_splits == len(pieces) >= 2
        for s, piece in enumerate(pieces):
            assert piece[:4] == merge[:4]
            assert piece.partial == merge.partial + s * rows
            assert s == 0 or piece.kv_begin == pieces[s - 1].kv_end
            scratch = set(range(piece.partial, piece.partial + rows))
            assert not scratch & used
            used |= scratch
    assert used == set(range(len(used))), "scratch rows are packed"
    assert all((t.partial < 0) == (t.merge < 0) for t in tasks)
    assert sum(t.merge >= 0 for t in tasks) == sum(m.num_splits for m in merges)


def test_tables_are_int32_rows_of_eight_even_when_empty() -> None:
    table = plan_tasks(offsets([0]), torch.tensor([5]).int(), AttentionShape(2, 1, 8, 8), page_size=4, units=2)
    for part in (table.tasks, table.merges):
        assert part.dtype == torch.int32 and part.shape == (0, 8) and part.is_contiguous()


def test_padding_rows_without_keys_have_no_task() -> None:
    shape = AttentionShape(2, 1, 8, 8)
    tasks, _ = rows_of(plan_tasks(offsets([1, 1]), torch.tensor([0, 3]).int(), shape, page_size=4, units=2))
    assert [t.request for t in tasks] == [1]


@pytest.mark.parametrize("group", [1, 3, 4, 7, 80])
def test_a_block_holds_whole_tokens_unless_one_token_is_larger(group: int) -> None:
    block = row_block(AttentionShape(group, 1, 8, 8), 64)
    assert block <= 64
    assert block % group == 0 if group <= 64 else block == 64


def test_long_decodes_are_cut_along_the_keys_and_prefills_are_not() -> None:
    shape = AttentionShape(8, 2, 64, 64)
    tasks, merges = rows_of(
        plan_tasks(offsets([512, 1]), torch.tensor([512, 8192]).int(), shape, page_size=16, units=4)
    )
    assert all(t.merge < 0 for t in tasks if t.request == 0)
    assert {m.request for m in merges} == {1}


def test_a_prefill_too_small_for_the_machine_is_cut_too() -> None:
    shape = AttentionShape(8, 2, 64, 64)
    tasks, merges = rows_of(plan_tasks(offsets([8]), torch.tensor([8192]).int(), shape, page_size=16, units=64))
    assert len(merges) == 2 and len(tasks) >= 64


def test_many_decodes_that_fill_the_machine_are_not_cut() -> None:
    lens = torch.full((64,), 1024).int()
    table = plan_tasks(offsets([1] * 64), lens, AttentionShape(9, 3, 64, 64), page_size=16, units=2)
    assert table.tasks.shape[0] == 64 * 3 and table.merges.shape[0] == 0


def test_order_is_longest_first_and_interleaved() -> None:
    shape = AttentionShape(4, 1, 64, 64)
    q_lens, kv_lens = [256, *[1] * 12], [512, *range(200, 1400, 100)]
    tasks, _ = rows_of(plan_tasks(offsets(q_lens), torch.tensor(kv_lens).int(), shape, page_size=16, units=1))
    for kind in (True, False):
        lengths = [t.kv_end - t.kv_begin for t in tasks if (t.request == 0) == kind]
        assert lengths == sorted(lengths, reverse=True)
    # Both kinds appear in each third of the list.
    third = len(tasks) // 3
    for part in (tasks[:third], tasks[third : 2 * third], tasks[2 * third :]):
        assert {t.request == 0 for t in part} == {True, False}


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

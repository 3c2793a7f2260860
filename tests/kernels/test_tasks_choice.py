"""What the planner chooses: how many rows share their keys, where it cuts, what it starts first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from chunkc.kernels.device import H100, cpu, cuda
from chunkc.kernels.tasks import AttentionShape, plan_tasks

SMALL, LARGE = AttentionShape(9, 3, 64, 64), AttentionShape(32, 8, 128, 128)


def plan(q_lens: list[int], kv_lens: list[int], shape: AttentionShape, **options) -> tuple[np.ndarray, np.ndarray]:
    """(tasks, merges) of a plan for pages of 16."""
    offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
    table = plan_tasks(offsets, torch.tensor(kv_lens).int(), shape, page_size=16, **options)
    return table.tasks.numpy(), table.merges.numpy()


def on_h100(q_lens: list[int], kv_lens: list[int], shape: AttentionShape = LARGE, **options) -> tuple:
    return plan(q_lens, kv_lens, shape, units=H100.slots, device=H100, **options)


def test_a_decode_longer_than_a_units_share_is_cut_and_a_prefill_beside_it_is_not() -> None:
    tasks, merges = plan([512, 1], [512, 65536], AttentionShape(8, 2, 64, 64), units=4)
    assert set(merges[:, 0]) == {1}
    assert (tasks[tasks[:, 0] == 0][:, 6] == -1).all()


@pytest.mark.parametrize("beside", [[], [2], [700]])
def test_decodes_are_cut_whatever_the_longest_query_is(beside: list[int]) -> None:
    # A batch with one query of two tokens is what makes others give up cutting.
    tasks, _ = on_h100([1] * 4 + beside, [16384] * 4 + beside)
    decode = tasks[tasks[:, 0] < 4]
    assert (decode[:, 6] >= 0).mean() > 0.9
    assert (decode[:, 5] - decode[:, 4]).max() <= 4 * 8 * 16384 / 132 * 1.3


def test_a_prefill_too_small_for_the_machine_is_cut_too() -> None:
    tasks, merges = plan([8], [8192], AttentionShape(8, 2, 64, 64), units=64)
    assert len(merges) == 2 and len(tasks) >= 64


def test_many_decodes_that_fill_the_machine_are_not_cut() -> None:
    tasks, merges = plan([1] * 64, [1024] * 64, SMALL, units=2)
    assert len(tasks) == 64 * 3 and len(merges) == 0


def test_where_tasks_are_dear_fewer_are_made() -> None:
    dear = dataclasses.replace(H100, task_overhead=1e-3)
    batch = [1] * 4, [1500] * 4
    few, _ = plan(*batch, LARGE, units=132, device=dear)
    many, _ = plan(*batch, LARGE, units=132, device=H100)
    assert len(few) == 32 and len(many) > 100


def test_there_are_not_many_more_cuts_than_units() -> None:
    generator = np.random.default_rng(0)
    for count in (1, 3, 17, 40, 100):
        lens = generator.integers(200, 4000, count)
        tasks, _ = on_h100([1] * count, lens.tolist())
        assert len(tasks) <= count * 8 + 2 * 132


def test_only_what_a_window_shows_is_planned() -> None:
    shape = dataclasses.replace(LARGE, window=128)
    tasks, _ = on_h100([1] * 4, [100_000] * 4, shape)
    assert tasks[:, 4].min() == 100_000 - 128 and tasks[:, 5].max() == 100_000


def test_long_prefills_get_large_blocks_and_short_ones_small() -> None:
    def rows(q_len: int, **options) -> int:
        tasks, _ = on_h100([q_len], [q_len], **options)
        return (tasks[:, 3] - tasks[:, 2]).max()

    assert rows(4096) == 128  # a block of 64 reads the keys twice as often as it can multiply them
    assert rows(64) < 64  # blocks of 64 rows would be 4 for each head, on 132 units
    assert rows(4096, q_block=64) == 64


def test_the_cost_of_a_task_is_the_larger_of_its_bytes_and_its_arithmetic() -> None:
    cost = H100.task_cost(LARGE)
    per_key = 2 * 128 * 2
    decode = cost.seconds(rows=4, keys=1000, blocks=1, is_piece=False) - cost.overhead
    assert decode == pytest.approx((1000 * per_key + 4 * per_key) * 132 / H100.bandwidth)
    prefill = cost.seconds(rows=128, keys=1000, blocks=16, is_piece=False) - cost.overhead
    flops, row_bytes = 4 * 128 * 128 * 1000, 128 * per_key
    assert prefill == pytest.approx(132 * (flops / H100.matrix_rate + row_bytes / H100.bandwidth))
    # an array as a number
    both = cost.seconds(np.array([4, 128]), np.array([1000, 1000]), np.array([1, 16]), np.array([False, False]))
    assert both == pytest.approx([decode + cost.overhead, prefill + cost.overhead])


def test_half_as_many_units_have_twice_the_share() -> None:
    whole, half = H100.task_cost(LARGE, 132), H100.task_cost(LARGE, 66)
    assert (half.key_first, half.pair, half.overhead) == (whole.key_first / 2, whole.pair / 2, whole.overhead)


def test_order_is_longest_first_and_interleaved() -> None:
    shape = AttentionShape(4, 1, 64, 64)
    q_lens, kv_lens = [256, *[1] * 12], [512, *range(200, 1400, 100)]
    tasks, _ = plan(q_lens, kv_lens, shape, units=1)
    is_prefill = tasks[:, 0] == 0
    for kind in (is_prefill, ~is_prefill):
        lengths = (tasks[kind, 5] - tasks[kind, 4]).tolist()
        assert lengths == sorted(lengths, reverse=True)
    # Both kinds appear in each third of the list.
    assert all(len(set(part)) == 2 for part in np.array_split(is_prefill, 3))


def test_a_task_as_long_as_the_step_is_not_kept_for_later() -> None:
    # By the progress of their kinds alone, the last of the long prefill blocks would start near the end.
    tasks, _ = on_h100([2048] + [1] * 40, [6144] + [1000] * 40)
    costs = H100.task_cost(LARGE).seconds(
        tasks[:, 3] - tasks[:, 2], tasks[:, 5] - tasks[:, 4], np.where(tasks[:, 0] == 0, 64, 1), tasks[:, 6] >= 0
    )
    start = np.cumsum(costs) - costs  # as one long line
    assert (start / 132 + costs <= 1.05 * costs.sum() / 132).all()


def test_plans_are_reproducible() -> None:
    generator = np.random.default_rng(1)
    lens = generator.integers(1, 3000, 100).tolist()
    first, again = (on_h100([1] * 100 + [300], [*lens, 900]) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_devices_say_what_they_are() -> None:
    assert (H100.slots, cpu(6).slots) == (132, 6)
    with pytest.raises(ValueError, match="positive"):
        dataclasses.replace(H100, bandwidth=0.0)

    @dataclasses.dataclass
    class Properties:
        name: str = "some GPU"
        major: int = 9
        multi_processor_count: int = 66

    unknown = cuda(Properties())
    assert (unknown.units, unknown.bandwidth) == (66, H100.bandwidth / 2)
    told = Properties()
    told.memory_clock_rate, told.memory_bus_width, told.clock_rate = 2_619_000, 5120, 1_830_000  # kHz, bits: an H100's
    told.multi_processor_count = 132
    assert cuda(told).bandwidth == pytest.approx(H100.bandwidth, rel=0.01)
    assert cuda(told).matrix_rate == pytest.approx(H100.matrix_rate, rel=0.02)

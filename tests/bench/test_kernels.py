"""``python -m chunkc.bench kernels``: its batches compute the right thing, and its table says what was measured."""

from __future__ import annotations

import pytest
import torch

from chunkc.bench import kernels
from chunkc.bench.__main__ import main
from chunkc.bench.kernels_cases import Batch, Inputs
from chunkc.kernels import cpu_backend
from chunkc.kernels.cpu_memory import prefer_huge_pages
from chunkc.kernels.tasks import AttentionShape

SHAPE = AttentionShape(6, 2, 32, 32)


@pytest.mark.parametrize("batch", [Batch("decode", (1, 1), (70, 33)), Batch("mixed", (1, 20, 7), (40, 50, 7))])
def test_ours_and_torch_compute_the_same(batch: Batch) -> None:
    assert cpu_backend.load()
    inputs = Inputs.make(batch, SHAPE, torch.float32)
    ours = inputs.ours(1)()  # also appends the step's keys, so the dense ones come after it
    theirs = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and q.shape[2] > 1, enable_gqa=True
        )[0].transpose(0, 1)
        for q, k, v, mask in inputs._dense
    ]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_pages_of_any_size(page_size: int) -> None:
    batch = Batch("decode", (1, 1), (70, 33))
    assert cpu_backend.load()
    inputs = Inputs.make(batch, SHAPE, torch.float32, page_size)
    assert inputs.k_pages.shape[0] == -(-70 // page_size) + -(-33 // page_size) and inputs.page_size == page_size
    row = kernels.Row(batch, inputs, "6/2/32", torch.float32, 1, {})
    assert row.run_bytes == {1: 256, 16: 4096, 100: 25600}[page_size]
    assert inputs.ours(1)().isfinite().all()


def test_work_is_counted_once_and_only_what_is_visible() -> None:
    batch = Batch("prefill", (3,), (5,))
    assert batch.operations(SHAPE) == 2 * (3 + 4 + 5) * 6 * (32 + 32)
    assert batch.bytes(SHAPE, torch.bfloat16) == 5 * 2 * 64 * 2


def test_share_is_the_median_of_rounds_and_of_mixed_batches_a_ratio_of_times() -> None:
    decode = Batch("decode 1", (1,), (64,))
    row = kernels.Row(decode, Inputs.make(decode, SHAPE, torch.float32), "6/2/32", torch.float32, 1, {})
    row.seconds["ours"] = [1.0, 2.0, 4.0]
    row.seconds["SDPA"] = [3.0, 2.0, 40.0]
    row.limit = [row.work, row.work, row.work]
    assert row.shares() == [1.0, 0.5, 0.25] and row.ratio("SDPA") == 3.0 and row.ratio("flex") is None
    mixed = Batch("mixed 1", (1, 4), (64, 8))
    other = kernels.Row(mixed, row.inputs, "6/2/32", torch.float32, 1, {}, {"ours": [3.0]}, [2.0])
    assert other.shares() == [1.5]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = "kernels --quick --rounds 1 --threads 1 --dtype float32 --no-torch --shape 9/3/64"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert torch.get_num_threads() == threads
    for case in (
        "decode 8 x 2048",
        "prefill 256 at 512",
        "mixed 8 x 1024 + 256 at 512",
        "our register tiles",
        "a run of 98304 bytes",
    ):
        assert case in out


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", "--threads", "0"])
    assert "must be an integer >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"), [("--threads 100000", "100000 threads are too many"), ("--page-size 1000000000000", "memory")]
)
def test_what_the_machine_has_not_is_one_sentence(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--quick", "--no-torch", *option.split()]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_huge_pages_keep_the_contents() -> None:
    tensor = torch.arange(3_000_000)
    prefer_huge_pages(tensor)  # whether it is granted depends on the system
    assert torch.equal(tensor, torch.arange(3_000_000)) and not prefer_huge_pages(torch.ones(3))

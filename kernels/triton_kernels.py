"""Device code of ``chunkc::mixed_attention``: appending keys and values, attending along the task table, merging.

Only :mod:`chunkc.kernels.triton_attention` (which launches it) and :mod:`chunkc.kernels.triton_resources` (which
compiles it ahead of time) import this module. The meaning is ``reference.py``, the table ``tasks.py``.

**One launch for the whole batch.** The grid has a fixed number of programs. Each takes tasks from a shared counter,
in the order of the table, until it has taken the last row or a row of -1, which ends a table that is longer than its
tasks. So the number of tasks is read from memory, and a recorded launch replays with any plan. Who takes a task
changes nothing about its result.

**A task** is computed like this, with BLOCK_M rows (query tokens x group) and BLOCK_N keys at a time::

    keys       kv_begin     full_begin                     full_end   kv_end
                  |  masked      |          unmasked           |  masked |
    first row     ..#############################################
    last row             ################################################

Between ``full_begin`` and ``full_end`` every row sees every key, so the long middle has no masks at all. The first
part exists only where there is a window or chunks. Slots outside [kv_begin, kv_end) are never read: they may hold
NaN, and 0 * NaN is NaN.

**Scores are held in base 2** (multiplied by log2 e), because exp2 is the instruction that there is.

**Head dims** are a main block, a power of two, and a tail (0 if there is none): 80 = 64 + 16, 96 = 64 + 32. What the
blocks have more than the dim is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16: it needs operands of tl.dot widened.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _dot(a, b, acc):
    """``acc + a @ b``; float32 operands are multiplied as such, not as tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _load_rows(base, offsets, valid, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Elements FIRST .. FIRST + BLOCK (those below DIM, then 0) of the rows at ``base + offsets``: [rows, BLOCK].
    With MASKED, rows that are not ``valid`` are 0 and not read."""
    dim = FIRST + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + dim[None, :]
    if FIRST + BLOCK > DIM:
        if MASKED:
            return tl.load(pointers, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    else:
        if MASKED:
            return tl.load(pointers, mask=valid[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _store_rows(base, offsets, x, valid, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """The inverse of :func:`_load_rows`, in the dtype of ``base``."""
    dim = FIRST + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + dim[None, :]
    if FIRST + BLOCK > DIM:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=valid[:, None] & (dim < DIM)[None, :])
    else:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _soft_cap(x, softcap):
    """``softcap * tanh(x / softcap)``. The exponential may overflow: 2 / inf is 0, and tanh is 1."""
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(x * (2.0 * LOG2E / softcap)))


@triton.jit
def _walk_keys(
    acc, acc_tail, peak, total,
    q, q_tail, first_key, last_key, slope, begin, end,
    k_head, v_head, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot, pages,
    scale, softcap,
    PAGE_SIZE: tl.constexpr, KV_ALIKE: tl.constexpr,
    QK_DIM: tl.constexpr, QK_MAIN: tl.constexpr, QK_TAIL: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr,
    HAS_START: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys ``begin .. end``; without MASKED a multiple of BLOCK_N that all rows see.

    Page ids are loaded one tile ahead, by hand: as loads that depend on loads in the same iteration, keys and values
    would have only one stage in flight, however many are asked for.
    """
    key = begin + tl.arange(0, BLOCK_N)
    page_of_next = tl.load(pages + key // PAGE_SIZE, mask=key < end, other=0)
    for tile in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
        key = tile + tl.arange(0, BLOCK_N)
        valid = key < end
        page = page_of_next.to(tl.int64)
        page_of_next = tl.load(pages + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        slot = key % PAGE_SIZE

        offset = page * k_stride_page + slot * k_stride_slot
        k = _load_rows(k_head, offset, valid, 0, QK_MAIN, QK_DIM, MASKED)
        scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if QK_TAIL > 0:
            k_tail = _load_rows(k_head, offset, valid, QK_MAIN, QK_TAIL, QK_DIM, MASKED)
            scores = _dot(q_tail, tl.trans(k_tail), scores)
        if HAS_SOFTCAP:
            scores = _soft_cap(scores * scale, softcap) * LOG2E
        else:
            scores = scores * (scale * LOG2E)
        if HAS_ALIBI:  # a row's position is the last key that it sees
            scores += slope[:, None] * (key[None, :] - last_key[:, None]).to(tl.float32)
        if MASKED:
            visible = (key[None, :] <= last_key[:, None]) & valid[None, :]
            if HAS_START:
                visible = visible & (key[None, :] >= first_key[:, None])
            scores = tl.where(visible, scores, MINUS_INF)

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet has peak -inf: 0 in its place keeps -inf - -inf out, and its weights are 0.
        base = tl.where(new_peak == MINUS_INF, 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.sum(weights, 1)
        peak = new_peak

        if not KV_ALIKE:
            offset = page * v_stride_page + slot * v_stride_slot
        v = _load_rows(v_head, offset, valid, 0, V_MAIN, V_DIM, MASKED)
        weights = weights.to(v.dtype)
        acc = _dot(weights, v, acc * rescale[:, None])
        if V_TAIL > 0:
            v_tail = _load_rows(v_head, offset, valid, V_MAIN, V_TAIL, V_DIM, MASKED)
            acc_tail = _dot(weights, v_tail, acc_tail * rescale[:, None])
    return acc, acc_tail, peak, total


@triton.jit
def _add_sink(peak, total, sinks, head, valid):
    """The sink's share of the softmax: (factor of the sums so far, the new total)."""
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    base = tl.maximum(peak, sink)
    base = tl.where(base == MINUS_INF, 0.0, base)
    factor = tl.exp2(peak - base)
    return factor, total * factor + tl.exp2(sink - base)


@triton.jit
def _attend_rows(
    first_row, row_end, kv_head, kv_begin, kv_end, partial_row, first_token, first_position,
    q, k_pages, v_pages, out, partial_acc, partial_stats, pages, sinks, alibi_slopes,
    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_slot,
    v_stride_page, v_stride_head, v_stride_slot, out_stride_token,
    scale, softcap, window, chunk, scratch_rows,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_ALIKE: tl.constexpr,
    QK_DIM: tl.constexpr, QK_MAIN: tl.constexpr, QK_TAIL: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows ``first_row .. min(first_row + BLOCK_M, row_end)`` of a task, over all its keys."""
    row = first_row + tl.arange(0, BLOCK_M)
    valid = row < row_end
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    q_offset = token.to(tl.int64) * q_stride_token + head * q_stride_head
    q_main = _load_rows(q, q_offset, valid, 0, QK_MAIN, QK_DIM, True)
    if QK_TAIL > 0:
        q_tail = _load_rows(q, q_offset, valid, QK_MAIN, QK_TAIL, QK_DIM, True)
    else:
        q_tail = q_main

    # The keys each row sees: first_key .. last_key, inclusive. Rows further down see later keys.
    last_key = first_position + row // GROUP
    first_key = tl.zeros([BLOCK_M], tl.int32)
    HAS_START: tl.constexpr = HAS_WINDOW or HAS_CHUNK
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0) * LOG2E
    else:
        slope = first_key  # not used
    full_begin = kv_begin
    final_row_position = first_position + (tl.minimum(first_row + BLOCK_M, row_end) - 1) // GROUP
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, last_key - window + 1)
        full_begin = tl.maximum(full_begin, final_row_position - window + 1)
    if HAS_CHUNK:
        first_key = tl.maximum(first_key, last_key // chunk * chunk)
        full_begin = tl.maximum(full_begin, final_row_position // chunk * chunk)
    full_end = tl.minimum(kv_end, first_position + first_row // GROUP + 1)
    head_tiles = (full_begin - kv_begin + BLOCK_N - 1) // BLOCK_N
    full_begin = tl.minimum(kv_begin + head_tiles * BLOCK_N, kv_end)
    full_end = full_begin + tl.maximum(full_end - full_begin, 0) // BLOCK_N * BLOCK_N

    k_head = k_pages + kv_head.to(tl.int64) * k_stride_head
    v_head = v_pages + kv_head.to(tl.int64) * v_stride_head
    acc = tl.zeros([BLOCK_M, V_MAIN], tl.float32)
    if V_TAIL > 0:
        acc_tail = tl.zeros([BLOCK_M, V_TAIL], tl.float32)
    else:
        acc_tail = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], MINUS_INF, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_START:
        acc, acc_tail, peak, total = _walk_keys(
            acc, acc_tail, peak, total, q_main, q_tail, first_key, last_key, slope, kv_begin, full_begin,
            k_head, v_head, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot, pages, scale, softcap,
            PAGE_SIZE, KV_ALIKE, QK_DIM, QK_MAIN, QK_TAIL, V_DIM, V_MAIN, V_TAIL, HAS_START, HAS_SOFTCAP, HAS_ALIBI,
            True, BLOCK_N,
        )  # fmt: skip
    acc, acc_tail, peak, total = _walk_keys(
        acc, acc_tail, peak, total, q_main, q_tail, first_key, last_key, slope, full_begin, full_end,
        k_head, v_head, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot, pages, scale, softcap,
        PAGE_SIZE, KV_ALIKE, QK_DIM, QK_MAIN, QK_TAIL, V_DIM, V_MAIN, V_TAIL, HAS_START, HAS_SOFTCAP, HAS_ALIBI,
        False, BLOCK_N,
    )  # fmt: skip
    acc, acc_tail, peak, total = _walk_keys(
        acc, acc_tail, peak, total, q_main, q_tail, first_key, last_key, slope, full_end, kv_end,
        k_head, v_head, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot, pages, scale, softcap,
        PAGE_SIZE, KV_ALIKE, QK_DIM, QK_MAIN, QK_TAIL, V_DIM, V_MAIN, V_TAIL, HAS_START, HAS_SOFTCAP, HAS_ALIBI,
        True, BLOCK_N,
    )  # fmt: skip

    if partial_row >= 0:
        index = partial_row.to(tl.int64) + tl.arange(0, BLOCK_M)
        valid = valid & (index < scratch_rows)
        _store_rows(partial_acc, index * V_DIM, acc, valid, 0, V_MAIN, V_DIM)
        if V_TAIL > 0:
            _store_rows(partial_acc, index * V_DIM, acc_tail, valid, V_MAIN, V_TAIL, V_DIM)
        tl.store(partial_stats + index * 2, peak, mask=valid)
        tl.store(partial_stats + index * 2 + 1, total, mask=valid)
    else:
        factor = tl.full([BLOCK_M], 1.0, tl.float32)
        if HAS_SINKS:
            factor, total = _add_sink(peak, total, sinks, head, valid)
        factor = tl.where(total == 0.0, 0.0, factor / total)
        out_offset = token.to(tl.int64) * out_stride_token + head * V_DIM
        _store_rows(out, out_offset, acc * factor[:, None], valid, 0, V_MAIN, V_DIM)
        if V_TAIL > 0:
            _store_rows(out, out_offset, acc_tail * factor[:, None], valid, V_MAIN, V_TAIL, V_DIM)


@triton.jit(do_not_specialize=["num_tasks", "scratch_rows", "window", "chunk"])
def attend_kernel(
    q, k_pages, v_pages, out, partial_acc, partial_stats, counter,
    tasks, q_offsets, kv_lens, page_table, sinks, alibi_slopes,
    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_slot,
    v_stride_page, v_stride_head, v_stride_slot, out_stride_token, page_table_stride,
    scale, softcap, window, chunk, num_tasks, scratch_rows,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_ALIKE: tl.constexpr,
    QK_DIM: tl.constexpr, QK_MAIN: tl.constexpr, QK_TAIL: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, LARGE_M: tl.constexpr, LARGE_N: tl.constexpr,
):  # fmt: skip
    """Take tasks until there are none. ``counter`` starts at the number of programs.

    SMALL_M x SMALL_N is the tile of tasks with few rows (decodes), LARGE_M x LARGE_N that of all others. A variant
    without one of the two (0) does every task with the other, several blocks of rows one after another if need be:
    variants differ in speed only.
    """
    index = tl.program_id(0)
    while index < num_tasks:
        task = tasks + index * 8
        request = tl.load(task)
        row_begin, row_end = tl.load(task + 2), tl.load(task + 3)
        ticket = tl.atomic_add(counter, 1, sem="relaxed")  # asked for early: it arrives while this task is computed
        index = tl.where(request < 0, num_tasks, ticket)

        request = tl.maximum(request, 0)  # a row of -1 has no rows, and the loops below do nothing
        kv_head, kv_begin, kv_end = tl.load(task + 1), tl.load(task + 4), tl.load(task + 5)
        partial_row = tl.load(task + 6)
        first_token = tl.load(q_offsets + request)
        q_len = tl.load(q_offsets + request + 1) - first_token
        first_position = tl.load(kv_lens + request) - q_len
        pages = page_table + request.to(tl.int64) * page_table_stride
        if SMALL_M > 0:
            small_end = row_end
            if LARGE_M > 0:
                small_end = tl.where(row_end - row_begin <= SMALL_M, row_end, row_begin)
            for first_row in range(row_begin, small_end, SMALL_M):
                _attend_rows(
                    first_row, row_end, kv_head, kv_begin, kv_end,
                    tl.where(partial_row >= 0, partial_row + first_row - row_begin, -1), first_token, first_position,
                    q, k_pages, v_pages, out, partial_acc, partial_stats, pages, sinks, alibi_slopes,
                    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_slot,
                    v_stride_page, v_stride_head, v_stride_slot, out_stride_token,
                    scale, softcap, window, chunk, scratch_rows,
                    GROUP, PAGE_SIZE, KV_ALIKE, QK_DIM, QK_MAIN, QK_TAIL, V_DIM, V_MAIN, V_TAIL,
                    HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_SINKS, HAS_ALIBI, SMALL_M, SMALL_N,
                )  # fmt: skip
        if LARGE_M > 0:
            large_end = row_end
            if SMALL_M > 0:
                large_end = tl.where(row_end - row_begin <= SMALL_M, row_begin, row_end)
            for first_row in range(row_begin, large_end, LARGE_M):
                _attend_rows(
                    first_row, row_end, kv_head, kv_begin, kv_end,
                    tl.where(partial_row >= 0, partial_row + first_row - row_begin, -1), first_token, first_position,
                    q, k_pages, v_pages, out, partial_acc, partial_stats, pages, sinks, alibi_slopes,
                    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_slot,
                    v_stride_page, v_stride_head, v_stride_slot, out_stride_token,
                    scale, softcap, window, chunk, scratch_rows,
                    GROUP, PAGE_SIZE, KV_ALIKE, QK_DIM, QK_MAIN, QK_TAIL, V_DIM, V_MAIN, V_TAIL,
                    HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_SINKS, HAS_ALIBI, LARGE_M, LARGE_N,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_merges", "scratch_rows"])
def merge_kernel(
    out, partial_acc, partial_stats, merges, q_offsets, sinks, out_stride_token, num_merges, scratch_rows,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of the split blocks, in the order of the keys, whoever computed them and when.

    A merge that names scratch rows beyond ``scratch_rows`` (a table that this body was not given scratch for) makes
    its rows NaN.
    """
    for index in range(tl.program_id(0), num_merges, tl.num_programs(0)):
        merge = merges + index * 8
        request, kv_head = tl.load(merge), tl.load(merge + 1)
        row_begin, row_end = tl.load(merge + 2), tl.load(merge + 3)
        first_piece, num_splits = tl.load(merge + 4).to(tl.int64), tl.load(merge + 5)
        num_rows = row_end - row_begin  # 0 in the rows of -1 that fill a table up
        first_token = tl.load(q_offsets + tl.maximum(request, 0))
        for first_row in range(row_begin, row_end, BLOCK_M):
            row = first_row + tl.arange(0, BLOCK_M)
            valid = row < row_end
            head = kv_head * GROUP + row % GROUP
            acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
            peak = tl.full([BLOCK_M], MINUS_INF, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for piece in range(0, num_splits):
                index_of_row = first_piece + piece * num_rows + row - row_begin
                present = valid & (index_of_row < scratch_rows)
                piece_peak = tl.load(partial_stats + index_of_row * 2, mask=present, other=float("nan"))
                piece_total = tl.load(partial_stats + index_of_row * 2 + 1, mask=present, other=float("nan"))
                piece_acc = _load_rows(partial_acc, index_of_row * V_DIM, present, 0, V_BLOCK, V_DIM, True)
                new_peak = tl.maximum(peak, piece_peak)
                base = tl.where(new_peak == MINUS_INF, 0.0, new_peak)
                rescale, weight = tl.exp2(peak - base), tl.exp2(piece_peak - base)
                acc = acc * rescale[:, None] + piece_acc * weight[:, None]
                total = total * rescale + piece_total * weight
                peak = new_peak
            factor = tl.full([BLOCK_M], 1.0, tl.float32)
            if HAS_SINKS:
                factor, total = _add_sink(peak, total, sinks, head, valid)
            factor = tl.where(total == 0.0, 0.0, factor / total)
            out_offset = (first_token + row // GROUP).to(tl.int64) * out_stride_token + head * V_DIM
            _store_rows(out, out_offset, acc * factor[:, None], valid, 0, V_BLOCK, V_DIM)


@triton.jit(do_not_specialize=["counter_start"])
def append_kernel(
    k, v, k_pages, v_pages, out, slot_mapping, counter,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_pages_stride_page, k_pages_stride_head, k_pages_stride_slot,
    v_pages_stride_page, v_pages_stride_head, v_pages_stride_slot, counter_start,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    QK_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
    OUT_ROW: tl.constexpr, OUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token: copy its key and value to their slot, clear its row of the output (which no task may
    cover), and set the counter that the next launch takes tasks from."""
    token = tl.program_id(0).to(tl.int64)
    if token == 0:
        tl.store(counter, counter_start)
    zero = tl.zeros([OUT_BLOCK], out.dtype.element_ty)
    for begin in range(0, OUT_ROW, OUT_BLOCK):
        element = begin + tl.arange(0, OUT_BLOCK)
        tl.store(out + token * OUT_ROW + element, zero, mask=element < OUT_ROW)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        to_k = k_pages + page * k_pages_stride_page + offset * k_pages_stride_slot
        to_v = v_pages + page * v_pages_stride_page + offset * v_pages_stride_slot
        for first_head in range(0, HEADS, HEADS_BLOCK):
            head = first_head + tl.arange(0, HEADS_BLOCK)
            exists = head < HEADS
            head = head.to(tl.int64)
            x = _load_rows(k + token * k_stride_token, head * k_stride_head, exists, 0, QK_BLOCK, QK_DIM, True)
            _store_rows(to_k, head * k_pages_stride_head, x, exists, 0, QK_BLOCK, QK_DIM)
            x = _load_rows(v + token * v_stride_token, head * v_stride_head, exists, 0, V_BLOCK, V_DIM, True)
            _store_rows(to_v, head * v_pages_stride_head, x, exists, 0, V_BLOCK, V_DIM)

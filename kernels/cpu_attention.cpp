// chunkc::mixed_attention on CPU: paged, ragged, causal attention along a task table.
//
// The meaning is kernels/reference.py, the table kernels/tasks.py, a task's computation cpu_task.h. Threads take tasks
// from an atomic counter in the table's order. The one that finishes the last piece of a split block merges the pieces,
// in the order of the keys: the same result whoever it is.

#include "cpu_dtype.h"
#include "cpu_operator.h"
#include "cpu_parallel.h"
#include "cpu_rotary.h"
#include "cpu_table.h"
#include "cpu_task.h"

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace chunkc {
namespace {

// Writes this step's keys and values to the pages and clears the output, which no task may cover (padding). With
// tables, keys are rotated on their way and queries into `rotated`.
template <typename T>
void append_and_clear(
    const Tensor& k, const Tensor& v, Tensor& k_pages, Tensor& v_pages, const Tensor& slot_mapping, Tensor& out,
    const RotaryTables& tables, const Tensor& q, const Tensor& rotated) {
  const View<const T> from_k(k), from_v(v), from_q(q);
  const View<T> to_k(k_pages), to_v(v_pages), to_out(out), to_q(rotated);
  const int64_t heads = k.size(1), qk_dim = k.size(2), v_dim = v.size(2), page_size = k_pages.size(2);
  const int64_t out_row = out.size(1) * out.size(2);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  parallel_ranges(k.size(0), 64, [&](int64_t begin, int64_t end) {
    std::fill_n(to_out.at(begin, 0), (end - begin) * out_row, T(0.0f));
    std::optional<Rotation<T>> rotation;
    if (tables)
      rotation.emplace(tables);
    for (int64_t t = begin; t < end; ++t) {
      if (rotation) {
        rotation->set_token(t);
        for (int64_t h = 0; h < q.size(1); ++h)
          rotation->rotate(from_q.at(t, h), to_q.at(t, h), qk_dim);
      }
      if (slots[t] < 0)
        continue;
      const int64_t page = slots[t] / page_size, offset = slots[t] % page_size;
      for (int64_t h = 0; h < heads; ++h) {
        if (rotation)
          rotation->rotate(from_k.at(t, h), to_k.at(page, h, offset), qk_dim);
        else
          std::copy_n(from_k.at(t, h), qk_dim, to_k.at(page, h, offset));
        std::copy_n(from_v.at(t, h), v_dim, to_v.at(page, h, offset));
      }
    }
  });
}

// How many threads the tasks are worth: waking one takes about as long as the work on a hundred thousand elements.
int64_t threads_for(const Task* tasks, int64_t num_tasks, const Call& call) {
  constexpr int64_t kElements = 100'000;
  int64_t elements = 0;
  for (int64_t i = 0; i < num_tasks; ++i) {
    const int64_t row_cost = 8 + tasks[i].row_end - tasks[i].row_begin;  // up to 8 rows, loading counts
    elements += (int64_t(tasks[i].kv_end) - tasks[i].kv_begin) * (call.qk_dim + call.v_dim) * row_cost / 8;
  }
  return std::min({num_threads(), num_tasks, 1 + std::max<int64_t>(elements, 0) / kElements});
}

// The tasks in the table's order, those together that make a bundle. Near the end bundles get smaller, down to single
// tasks, so that the threads end together.
template <typename T>
std::vector<Bundle> make_bundles(const Body<T>& body, const Task* tasks, int64_t num_tasks, int64_t threads) {
  constexpr int64_t kMost = 16;
  std::vector<Bundle> bundles;
  const auto rows_and_keys = [](const Task& t) {
    return std::tuple(t.request, t.row_begin, t.row_end, t.kv_begin, t.kv_end);
  };
  for (int64_t i = 0, end; i < num_tasks; i = end) {
    const int64_t fair = threads == 1 ? kMost : std::clamp<int64_t>((num_tasks - i) / (2 * threads), 1, kMost);
    const int64_t most = body.has_few_rows(tasks[i]) ? std::min(i + fair, num_tasks) : i + 1;
    for (end = i + 1; end < most && rows_and_keys(tasks[end]) == rows_and_keys(tasks[i]);)
      ++end;
    bundles.push_back({tasks + i, end - i});
  }
  return bundles;
}

template <typename T>
void run_tasks(const Body<T>& body, const Task* tasks, int64_t num_tasks, int64_t threads) {
  const std::vector<Bundle> bundles = make_bundles(body, tasks, num_tasks, threads);
  const int64_t count = bundles.size();
  std::atomic<int64_t> next{0};
  in_parallel(threads, [&](int64_t) {
    thread_local Workspace workspace;
    const auto take = [&]() -> const Bundle* {
      const int64_t i = next++;
      return i < count ? &bundles[i] : nullptr;
    };
    // A bundle ahead, so that its keys can be asked for; not near the end, where another thread would wait for it.
    bool fetched = false;
    for (const Bundle* bundle = take(); bundle;) {
      const bool ahead = body.has_few_rows(bundle->first()) && next.load() + 2 * threads <= count;
      const Bundle* after = ahead ? take() : nullptr;
      body.run(*bundle, workspace, fetched, after);
      fetched = after != nullptr;
      bundle = after ? after : take();
    }
  });
}

void check_table(const Tensor& t, const char* name, ScalarType dtype, int64_t dim) {
  CHUNKC_CHECK_TYPE(t.scalar_type() == dtype, "mixed_attention: ", name, " must be ", dtype, ", not ", t.scalar_type());
  CHUNKC_CHECK_VALUE(
      t.dim() == dim && t.is_contiguous(), "mixed_attention: ", name, " must be contiguous and ", dim, "-d");
}

Tensor mixed_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_pages, Tensor& v_pages,
    const Tensor& q_offsets, const Tensor& kv_lens, const Tensor& page_table,
    const Tensor& slot_mapping, const Tensor& tasks, const Tensor& merges,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi_slopes, double scale,
    int64_t window, int64_t chunk, double softcap, const std::optional<Tensor>& cos,
    const std::optional<Tensor>& sin) {
  CHUNKC_CHECK_VALUE(
      q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k_pages.dim() == 4 && v_pages.dim() == 4,
      "mixed_attention: q, k, v must be 3-d and the pages 4-d");
  CHUNKC_CHECK_VALUE(
      k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(1) == v.size(1) &&
          k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.size(2) > 0 && v.size(2) > 0,
      "mixed_attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit together");
  CHUNKC_CHECK_VALUE(
      k_pages.size(0) == v_pages.size(0) && k_pages.size(1) == k.size(1) && v_pages.size(1) == k.size(1) &&
          k_pages.size(2) == v_pages.size(2) && k_pages.size(3) == k.size(2) && v_pages.size(3) == v.size(2) &&
          k_pages.stride(3) == 1 && v_pages.stride(3) == 1,
      "mixed_attention: pages ", k_pages.sizes(), " and ", v_pages.sizes(), " do not fit k ", k.sizes(), " and v ",
      v.sizes());
  for (ScalarType dtype : {k.scalar_type(), v.scalar_type(), k_pages.scalar_type(), v_pages.scalar_type()})
    CHUNKC_CHECK_TYPE(dtype == q.scalar_type(), "mixed_attention: q, k, v and the pages must share one dtype");
  CHUNKC_CHECK_TYPE(
      place_of(q.scalar_type()) >= 0, "mixed_attention: float32, bfloat16 or float16 wanted, not ", q.scalar_type());
  CHUNKC_CHECK(
      q.scalar_type() == kElement, "mixed_attention: nothing is loaded for ", q.scalar_type(),
      ": call chunkc.kernels.cpu_backend.load(torch.", q.scalar_type(), ")");
  check_table(q_offsets, "q_offsets", kInt, 1), check_table(kv_lens, "kv_lens", kInt, 1);
  check_table(page_table, "page_table", kInt, 2), check_table(slot_mapping, "slot_mapping", kLong, 1);
  check_table(tasks, "tasks", kInt, 2), check_table(merges, "merges", kInt, 2);
  CHUNKC_CHECK_VALUE(
      q_offsets.size(0) == kv_lens.size(0) + 1 && page_table.size(0) == kv_lens.size(0) &&
          slot_mapping.size(0) == q.size(0) && tasks.size(1) == 8 && merges.size(1) == 8,
      "mixed_attention: the batch's tensors do not fit together");
  const RotaryTables tables = rotary_tables(q, cos, sin);

  const auto contiguous_rows = [](const Tensor& t) { return t.stride(2) == 1 ? t : t.contiguous(); };
  const Tensor queries = contiguous_rows(q), keys = contiguous_rows(k), values = contiguous_rows(v);
  Tensor out = empty_cpu({q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  const auto per_head = [&](const std::optional<Tensor>& t, const char* what) {
    if (!t)
      return Tensor();
    CHUNKC_CHECK_VALUE(
        t->dim() == 1 && t->size(0) == q.size(1), "mixed_attention: one ", what, " per query head wanted");
    return t->to(kFloat).contiguous();
  };
  const Tensor sinks_float = per_head(sinks, "sink"), slopes_float = per_head(alibi_slopes, "ALiBi slope");

  Call call{};
  call.q_offsets = q_offsets.const_data_ptr<int32_t>();
  call.kv_lens = kv_lens.const_data_ptr<int32_t>();
  call.page_table = page_table.const_data_ptr<int32_t>();
  call.page_table_stride = page_table.size(1);
  call.num_requests = kv_lens.size(0), call.num_tokens = q.size(0);
  call.num_pages = k_pages.size(0), call.page_size = k_pages.size(2);
  call.num_q_heads = q.size(1), call.num_kv_heads = k.size(1), call.group = q.size(1) / k.size(1);
  call.qk_dim = q.size(2), call.v_dim = v.size(2);
  call.sinks = sinks ? sinks_float.const_data_ptr<float>() : nullptr;
  call.alibi_slopes = alibi_slopes ? slopes_float.const_data_ptr<float>() : nullptr;
  call.scale = scale, call.softcap = softcap, call.window = window, call.chunk = chunk;
  call.merges = reinterpret_cast<const Merge*>(merges.const_data_ptr<int32_t>());

  const Task* table = reinterpret_cast<const Task*>(tasks.const_data_ptr<int32_t>());
  const int64_t num_merges = merges.size(0), scratch_rows = check_tables(call, table, tasks.size(0), num_merges);
  check_slots(call, slot_mapping.const_data_ptr<int64_t>());
  check_pages(call, table, tasks.size(0));
  Tensor partials = empty_cpu({scratch_rows, v.size(2) + 2}, kFloat);
  std::unique_ptr<std::atomic<int32_t>[]> pieces_left(new std::atomic<int32_t>[num_merges]);
  for (int64_t i = 0; i < num_merges; ++i)
    pieces_left[i] = call.merges[i].num_splits;
  call.partials = partials.mutable_data_ptr<float>(), call.pieces_left = pieces_left.get();

  const Tensor rotated = tables ? empty_cpu({q.size(0), q.size(1), q.size(2)}, q.scalar_type()) : queries;
  append_and_clear<Element>(keys, values, k_pages, v_pages, slot_mapping, out, tables, queries, rotated);
  run_tasks<Element>(
      Body<Element>(call, rotated, k_pages, v_pages, out), table, tasks.size(0),
      threads_for(table, tasks.size(0), call));
  return out;
}

void boxed_mixed_attention(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor q = in.tensor(), k = in.tensor(), v = in.tensor();
  Tensor k_pages = in.tensor(), v_pages = in.tensor();
  const Tensor q_offsets = in.tensor(), kv_lens = in.tensor(), page_table = in.tensor(), slot_mapping = in.tensor();
  const Tensor tasks = in.tensor(), merges = in.tensor();
  const std::optional<Tensor> sinks = in.optional_tensor(), alibi_slopes = in.optional_tensor();
  const double scale = in.real();
  const int64_t window = in.integer(), chunk = in.integer();
  const double softcap = in.real();
  const std::optional<Tensor> cos = in.optional_tensor(), sin = in.optional_tensor();
  stack[0] = value_of(mixed_attention(
      q, k, v, k_pages, v_pages, q_offsets, kv_lens, page_table, slot_mapping, tasks, merges, sinks, alibi_slopes,
      scale, window, chunk, softcap, cos, sin));
}

std::atomic<Boxed> bodies[kDtypes] = {};

// The body of the library for q's dtype, or this one's, which says that there is none.
void hand_on(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(handle_on(stack[0]), &dtype);
  const int place = place_of(ScalarType(dtype));
  const Boxed body = place < 0 ? nullptr : bodies[place].load();
  (body ? body : boxed_mixed_attention)(stack, num_arguments, num_results);
}

}  // namespace
}  // namespace chunkc

// This library's body, and the place of its dtype.
CHUNKC_EXPORT chunkc::Boxed chunkc_attention_body() {
  return chunkc::boxed_mixed_attention;
}

CHUNKC_EXPORT int chunkc_attention_place() {
  return chunkc::place_of(chunkc::kElement);
}

// Has this library register the operator.
CHUNKC_EXPORT bool chunkc_register_attention() {
  return chunkc::register_operators({{"mixed_attention", chunkc::hand_on}});
}

// Has the library that registered the operator hand calls on.
CHUNKC_EXPORT void chunkc_serve_attention(int place, chunkc::Boxed body) {
  chunkc::bodies[place] = body;
}

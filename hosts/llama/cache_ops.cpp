#include "cache_ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>

#include "oscar/base/wait.h"
#include "report.h"
#include "statistics.h"

namespace oscar::llama {
namespace {

template <class F>
void guarded(F&& f) {  // C code above us
  try {
    f();
  } catch (const std::exception& e) {
    die(e.what());
  }
}

// [begin, end) of this thread's share.
struct Share {
  std::int64_t begin, end;
};
Share share(std::int64_t n, int ith, int nth) { return {n * ith / nth, n * (ith + 1) / nth}; }

// The smallest change a query can suffer. In place: nothing but the attention that is about to start reads Q.
void flip_lowest_bit(const AttentionArgs& args) {
  for (std::int64_t t = 0; t < args.n_tokens; ++t) {
    for (int h = 0; h < args.n_head; ++h) {
      float* first = const_cast<float*>(args.q) + t * args.q_token_stride + h * args.q_head_stride;
      if (std::isfinite(*first)) *first = std::bit_cast<float>(std::bit_cast<std::uint32_t>(*first) ^ 1U);
    }
  }
}

// Last token of a finished operation against the double-precision definition.
void compare_with_reference(const AttentionArgs& args) {
  if (args.n_tokens == 0) return;
  const auto v_dim = static_cast<std::size_t>(args.cache->layers()[static_cast<std::size_t>(args.layer_index)].v_dim);
  const std::int64_t last = args.n_tokens - 1;
  std::vector<float> expected(static_cast<std::size_t>(args.n_head) * v_dim);
  AttentionArgs one = args;
  one.n_tokens = 1;
  one.positions = args.positions + last;
  one.q = args.q + last * args.q_token_stride;
  one.mask = args.mask + last * args.mask_token_stride;
  one.out = expected.data();
  one.out_token_stride = static_cast<std::int64_t>(expected.size());
  one.out_head_stride = static_cast<std::int64_t>(v_dim);
  attention_reference(one);
  for (int h = 0; h < args.n_head; ++h) {
    const float* got = args.out + last * args.out_token_stride + h * args.out_head_stride;
    const float* want = expected.data() + static_cast<std::size_t>(h) * v_dim;
    double error = 0;
    double norm = 0;
    for (std::size_t d = 0; d < v_dim; ++d) {
      const double delta = static_cast<double>(got[d]) - want[d];
      error += delta * delta;
      norm += static_cast<double>(want[d]) * want[d];
    }
    double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    if (!(relative >= 0)) relative = HUGE_VAL;  // NaN must not look like 0
    std::atomic<double>& worst = counters().worst_error;
    double known = worst.load();
    while (relative > known && !worst.compare_exchange_weak(known, relative)) {
    }
    counters().checked_rows.fetch_add(1);
  }
}

}  // namespace

std::int64_t row_index(const ggml_tensor* indices, std::int64_t i) {
  return indices->type == GGML_TYPE_I64 ? static_cast<const std::int64_t*>(indices->data)[i]
                                        : static_cast<const std::int32_t*>(indices->data)[i];
}

void RowsOp::run(ggml_tensor*, int ith, int nth, void* userdata) {
  guarded([&] {
    const RowsOp& op = *static_cast<const RowsOp*>(userdata);
    const ggml_tensor* rows = op.node->src[0];
    const auto n_embd = static_cast<std::size_t>(rows->ne[0]);
    // Fewer rows than threads: all threads share each row.
    const bool by_part = rows->ne[1] < nth;
    const auto [begin, end] = by_part ? Share{0, rows->ne[1]} : share(rows->ne[1], ith, nth);
    const int part = by_part ? ith : 0;
    const int parts = by_part ? nth : 1;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto* row =
          reinterpret_cast<const float*>(static_cast<const std::byte*>(rows->data) + static_cast<std::size_t>(i) * rows->nb[1]);
      const std::int64_t cell = row_index(op.node->src[1], i);
      if (op.is_k) {
        op.cache->write_k(op.layer_index, cell, {row, n_embd}, part, parts);
      } else {
        op.cache->write_v(op.layer_index, cell, {row, n_embd}, part, parts);
      }
    }
  });
}

void AttentionOp::run(ggml_tensor*, int ith, int nth, void* userdata) {
  guarded([&] {
    AttentionOp& op = *static_cast<AttentionOp*>(userdata);
    int expected = 0;
    if (op.stage.compare_exchange_strong(expected, 1, std::memory_order_acq_rel)) {
      if (op.perturb_q) {
        for (const AttentionArgs& args : op.streams) flip_lowest_bit(args);
      }
      auto& jobs = op.scratch->jobs;
      while (jobs.size() < op.streams.size()) jobs.push_back(std::make_unique<AttentionJob>());
      for (std::size_t s = 0; s < op.streams.size(); ++s) jobs[s]->prepare(op.streams[s], nth);
      op.stage.store(2, std::memory_order_release);
    }
    wait_until([&] { return op.stage.load(std::memory_order_acquire) == 2; });
    for (std::size_t s = 0; s < op.streams.size(); ++s) op.scratch->jobs[s]->run(ith);
    if (op.check && op.finished.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
      for (const AttentionArgs& args : op.streams) compare_with_reference(args);
    }
  });
}

void ShiftOp::run(ggml_tensor*, int ith, int nth, void* userdata) {
  guarded([&] {
    const ShiftOp& op = *static_cast<const ShiftOp*>(userdata);
    const auto* deltas = static_cast<const std::int32_t*>(op.node->src[1]->data);
    const auto [begin, end] = share(op.cache->n_cells(), ith, nth);
    for (std::int64_t cell = begin; cell < end; ++cell) {
      // Below 0: llama.cpp has dropped the cell. A row of unknown position moves as well.
      const std::int32_t position = op.cache->position(cell);
      if (deltas[cell] == 0 || (position >= 0 && position + deltas[cell] < 0)) continue;
      op.cache->shift_layer(op.layer_index, cell, deltas[cell]);
    }
  });
}

void CaptureOp::run(ggml_tensor*, int ith, int nth, void* userdata) {
  guarded([&] {
    const CaptureOp& op = *static_cast<const CaptureOp*>(userdata);
    op.sink->on_attention(op.event, ith, nth);
  });
}

}  // namespace oscar::llama

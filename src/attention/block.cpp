#include "attention/block.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>

namespace oscar::attention {
namespace {

constexpr float kInvisible = -std::numeric_limits<float>::infinity();

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// Buffers are padded beyond dim, and the padding must be 0 for every head size that a job sees in its life.
void clear_padding(float* row, int dim, int padded) { std::fill(row + dim, row + padded, 0.0F); }

}  // namespace

void BlockState::start(int n_rows, int v_ld) {
  rows.assign(size_of(n_rows), Row{kInvisible, 0.0, 0.0});
  const std::size_t n = size_of(n_rows) * size_of(v_ld);
  exact.reserve(n);
  code.reserve(n);
  std::fill_n(exact.data(), n, 0.0F);
  std::fill_n(code.data(), n, 0.0F);
}

void BlockState::absorb(const BlockState& other, int v_ld) {
  for (std::size_t r = 0; r < rows.size(); ++r) {
    Row& a = rows[r];
    const Row& b = other.rows[r];
    if (b.max == kInvisible) continue;
    const float max = std::max(a.max, b.max);
    const double fa = (a.max == kInvisible) ? 0.0 : std::exp(static_cast<double>(a.max - max));
    const double fb = std::exp(static_cast<double>(b.max - max));
    const std::size_t begin = r * size_of(v_ld);
    for (std::size_t i = begin; i < begin + size_of(v_ld); ++i) {
      exact.data()[i] = static_cast<float>(fa) * exact.data()[i] + static_cast<float>(fb) * other.exact.data()[i];
      code.data()[i] = static_cast<float>(fa) * code.data()[i] + static_cast<float>(fb) * other.code.data()[i];
    }
    a = {max, fa * a.sum + fb * b.sum, fa * a.code_sum + fb * b.code_sum};
  }
}

void BlockWorker::run(const Operation& op, int kv_head, const TokenBlock& block, std::int64_t begin, std::int64_t end,
                      BlockState& state) {
  op_ = &op;
  kv_head_ = kv_head;
  block_ = block;
  rows_ = block.count * op.group;
  has_code_queries_ = false;
  load_queries();
  scores_.reserve(size_of(rows_ * kTile));
  state.start(rows_, op.v_ld);

  std::uint64_t misses = 0;
  for (std::int64_t column = begin; column < end; column += kTile) {
    if (!plan_.build(op.args, *op.kernels, block, column)) continue;
    misses += plan_.misses();
    load_keys();
    if (plan_.any_exact()) score(q_, keys_, op.k_ld, scores_);
    if (plan_.any_code()) score(code_q_, code_keys_, code_dim(), plan_.any_exact() ? code_scores_ : scores_);
    for (int t = 0; t < block.count; ++t) softmax_token(t, state);
    load_values();
    add_values(state);
  }
  // Per cell and query: not once per head or layer.
  if (misses != 0 && kv_head == 0 && op.args.layer_index == 0) op.args.cache->count_window_misses(misses);
}

void BlockWorker::load_queries() {
  const AttentionArgs& args = op_->args;
  q_.reserve(size_of(rows_) * size_of(op_->k_ld));
  for (int r = 0; r < rows_; ++r) {
    const std::int64_t token = block_.first + r / op_->group;
    const int head = kv_head_ * op_->group + r % op_->group;
    const float* in = args.q + token * args.q_token_stride + head * args.q_head_stride;
    float* out = q_.data() + static_cast<std::ptrdiff_t>(r) * op_->k_ld;
    for (int d = 0; d < op_->k_dim; ++d) out[d] = args.scale * in[d];
    clear_padding(out, op_->k_dim, op_->k_ld);
  }
}

// Only when the first coded row is met: short contexts have none.
void BlockWorker::load_code_queries() {
  const HeadMean& mean = op_->means[size_of(kv_head_)];
  const int ld = code_dim();
  code_q_.reserve(size_of(rows_) * size_of(ld));
  code_scores_.reserve(size_of(rows_ * kTile));
  constant_.resize(size_of(rows_));
  for (int r = 0; r < rows_; ++r) {
    const std::span<const float> q(q_.data() + static_cast<std::ptrdiff_t>(r) * op_->k_ld, size_of(op_->k_dim));
    float* out = code_q_.data() + static_cast<std::ptrdiff_t>(r) * ld;
    op_->k_codec->query_to_inner(kv_head_, q, {out, q.size()});
    clear_padding(out, op_->k_dim, op_->k_ld);
    mean.reorder_query(q, out + op_->k_ld);
    constant_[size_of(r)] = mean.constant_logit(q);
  }
  if (mean.table != nullptr) mean_rows_.start(&mean);
  has_code_queries_ = true;
}

// Looks the exact rows of the tile up and asks memory for all of them at once: rows of one head lie far apart, which the
// processor's own prefetch does not foresee.
void BlockWorker::find_exact_rows(bool is_k, std::array<const std::uint16_t*, kTile>& rows) const {
  const int dim = is_k ? op_->k_dim : op_->v_dim;
  for (int j = 0; j < kTile; ++j) {
    rows[size_of(j)] = nullptr;
    if (!plan_.reads_exact(j)) continue;
    const std::span<const std::uint16_t> row = op_->args.cache->exact(op_->args.layer_index, is_k, plan_.cell(j));
    assert(row.size() == size_of(op_->n_head_kv * dim));
    rows[size_of(j)] = row.data() + kv_head_ * dim;
    constexpr int kLine = 32;  // values
    for (int d = 0; d < dim; d += kLine) __builtin_prefetch(rows[size_of(j)] + d);
    __builtin_prefetch(rows[size_of(j)] + dim - 1);
  }
}

// Rows that nobody reads become 0, so that whatever their memory holds cannot reach a result.
void BlockWorker::load_exact(const std::array<const std::uint16_t*, kTile>& rows, int dim, int ld, FloatBuffer& tile) const {
  tile.reserve(size_of(kTile * ld));
  for (int j = 0; j < kTile; ++j) {
    float* out = tile.data() + j * ld;
    if (rows[size_of(j)] == nullptr) {
      std::fill_n(out, ld, 0.0F);
      continue;
    }
    op_->kernels->widen(rows[size_of(j)], dim, out);
    clear_padding(out, dim, ld);
  }
}

// As load_exact, from codes, in the inner basis. `padded` is the row's size without mean rows.
void BlockWorker::load_code(bool is_k, int dim, int padded, int ld, FloatBuffer& tile) {
  const Codec& codec = is_k ? *op_->k_codec : *op_->v_codec;
  tile.reserve(size_of(kTile * ld));
  for (int j = 0; j < kTile; ++j) {
    float* out = tile.data() + j * ld;
    if (!plan_.reads_code(j)) {
      std::fill_n(out, ld, 0.0F);
      continue;
    }
    codec.decode_inner(kv_head_, op_->args.cache->code(op_->args.layer_index, is_k, plan_.cell(j)), {out, size_of(dim)});
    clear_padding(out, dim, padded);
    if (ld != padded) mean_rows_.fill(*op_->kernels, plan_.position(j), out + padded);
  }
}

void BlockWorker::load_keys() {
  if (plan_.any_exact()) {
    find_exact_rows(true, k_rows_);
    find_exact_rows(false, v_rows_);
    load_exact(k_rows_, op_->k_dim, op_->k_ld, keys_);
  }
  if (!plan_.any_code()) return;
  if (!has_code_queries_) load_code_queries();
  load_code(true, op_->k_dim, op_->k_ld, code_dim(), code_keys_);
}

void BlockWorker::load_values() {
  if (plan_.any_exact()) load_exact(v_rows_, op_->v_dim, op_->v_ld, values_);
  if (plan_.any_code()) load_code(false, op_->v_dim, op_->v_ld, op_->v_ld, code_values_);
}

void BlockWorker::score(const FloatBuffer& queries, const FloatBuffer& keys, int dim, FloatBuffer& scores) {
  const Kernels& kernels = *op_->kernels;
  if (rows_ <= kFewRows) {
    kernels.dots(queries.data(), dim, rows_, keys.data(), dim, dim, scores.data());
    return;
  }
  panels_.reserve(size_of(kTile * dim));
  kernels.transpose(keys.data(), dim, dim, panels_.data());
  for (int p = 0; p < kTile; p += kPanel) {
    kernels.multiply(queries.data(), dim, rows_, dim, panels_.data() + p * dim, kPanel, kPanel, scores.data() + p, kTile,
                     false);
  }
}

// In a tile with both tiers: takes each cell's logit from the tier that the token reads.
void BlockWorker::merge_tiers(int token, int row) {
  float* s = scores_.data() + row * kTile;
  const float* code = code_scores_.data() + row * kTile;
  const std::uint32_t* select = plan_.select_code(token);
  const float constant = constant_[size_of(row)];
  for (int j = 0; j < kTile; ++j) s[j] = (select[j] != 0) ? code[j] + constant : s[j];
}

void BlockWorker::softmax_token(int token, BlockState& state) {
  const AttentionArgs& args = op_->args;
  const bool mixed = plan_.any_exact() && plan_.any_code();
  for (int h = 0; h < op_->group; ++h) {
    const int row = token * op_->group + h;
    float* s = scores_.data() + row * kTile;
    float* code = mixed ? code_scores_.data() + row * kTile : nullptr;
    if (!plan_.visible(token)) {
      std::fill_n(s, kTile, 0.0F);
      if (mixed) std::fill_n(code, kTile, 0.0F);
      continue;
    }
    float shift = 0.0F;
    if (mixed) {
      merge_tiers(token, row);
    } else if (plan_.any_code()) {
      shift = constant_[size_of(row)];
    }
    const float slope = (args.slopes != nullptr) ? args.slopes[kv_head_ * op_->group + h] : 1.0F;
    const float tile_max = op_->kernels->logits(s, plan_.bias(token), slope, shift, args.softcap);
    BlockState::Row& total = state.rows[size_of(row)];
    const float max = std::max(total.max, tile_max);
    if (max == kInvisible) {  // every visible logit is -inf, or NaN, which comparisons overlook
      if (std::any_of(s, s + kTile, [](float x) { return std::isnan(x); })) total.max = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(s, kTile, 0.0F);
      if (mixed) std::fill_n(code, kTile, 0.0F);
      continue;
    }
    if (max > total.max && total.max != kInvisible) rescale(state, row, std::exp(total.max - max));
    total.max = max;
    const auto sum = static_cast<double>(op_->kernels->exponentials(s, max));
    total.sum += sum;
    if (mixed) {
      const std::uint32_t* select = plan_.select_code(token);
      float code_sum = 0.0F;
      for (int j = 0; j < kTile; ++j) {
        code[j] = (select[j] != 0) ? s[j] : 0.0F;
        s[j] = (select[j] != 0) ? 0.0F : s[j];
        code_sum += code[j];
      }
      total.code_sum += static_cast<double>(code_sum);
    } else if (plan_.any_code()) {
      total.code_sum += sum;
    }
  }
}

void BlockWorker::rescale(BlockState& state, int row, float factor) const {
  BlockState::Row& total = state.rows[size_of(row)];
  total.sum *= static_cast<double>(factor);
  total.code_sum *= static_cast<double>(factor);
  float* exact = state.exact.data() + static_cast<std::ptrdiff_t>(row) * op_->v_ld;
  float* code = state.code.data() + static_cast<std::ptrdiff_t>(row) * op_->v_ld;
  for (int d = 0; d < op_->v_ld; ++d) exact[d] *= factor;
  for (int d = 0; d < op_->v_ld; ++d) code[d] *= factor;
}

void BlockWorker::add_values(BlockState& state) {
  const int ld = op_->v_ld;
  const auto add = [&](const FloatBuffer& p, const FloatBuffer& values, FloatBuffer& target) {
    op_->kernels->multiply(p.data(), kTile, rows_, kTile, values.data(), ld, ld, target.data(), ld, true);
  };
  if (plan_.any_exact()) add(scores_, values_, state.exact);
  if (plan_.any_code()) add(plan_.any_exact() ? code_scores_ : scores_, code_values_, state.code);
}

void BlockWorker::finish(const Operation& op, int kv_head, const TokenBlock& block, BlockState& state) {
  const AttentionArgs& args = op.args;
  head_row_.resize(size_of(op.v_dim));
  for (std::size_t r = 0; r < state.rows.size(); ++r) {
    const std::int64_t token = block.first + static_cast<std::int64_t>(r) / op.group;
    const int head = kv_head * op.group + static_cast<int>(r) % op.group;
    float* out = args.out + token * args.out_token_stride + head * args.out_head_stride;
    const BlockState::Row& total = state.rows[r];
    if (total.max == kInvisible) {
      std::fill_n(out, op.v_dim, 0.0F);
      continue;
    }
    double denominator = total.sum;
    double numerator = 1.0;
    if (args.sinks != nullptr) {
      const auto sink = static_cast<double>(args.sinks[head]);
      const auto max = static_cast<double>(total.max);
      // The sink may be far above every logit: keep both exponents at or below 0.
      const double top = std::max(sink, max);
      numerator = std::exp(max - top);
      denominator = total.sum * numerator + std::exp(sink - top);
    }
    const double factor = numerator / denominator;
    const float* exact = state.exact.data() + r * size_of(op.v_ld);
    const float* code = state.code.data() + r * size_of(op.v_ld);
    for (int d = 0; d < op.v_dim; ++d) out[d] = static_cast<float>(factor * static_cast<double>(exact[d]));
    if (total.code_sum == 0.0) continue;
    for (int d = 0; d < op.v_dim; ++d) head_row_[size_of(d)] = static_cast<float>(factor * static_cast<double>(code[d]));
    op.v_codec->inner_to_output(kv_head, head_row_, factor * total.code_sum, {out, size_of(op.v_dim)});
  }
}

}  // namespace oscar::attention

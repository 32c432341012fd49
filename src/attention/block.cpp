#include "attention/block.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oscar::attention {
namespace {

constexpr float kInvisible = -std::numeric_limits<float>::infinity();
// Logits may exceed a row's reference by so much: a new maximum seldom makes all sums be scaled anew.
constexpr float kHeadroom = 10.0F;

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

}  // namespace

void BlockState::start(const Operation& op, int n_rows) {
  rows.assign(size_of(n_rows), Row{kInvisible, 0.0, 0.0, {}});
  exact.reserve(size_of(n_rows * op.v_ld));
  code.reserve(size_of(n_rows * op.bases * op.code_ld));
  any_exact = false;
  bases_used = 0;
}

void BlockState::use_exact(const Operation& op) {
  if (!any_exact) std::fill_n(exact.data(), rows.size() * size_of(op.v_ld), 0.0F);
  any_exact = true;
}

void BlockState::use_bases(const Operation& op, unsigned bases) {
  for (int b = 0; b < op.bases; ++b) {
    if (((bases & ~bases_used) >> b & 1U) == 0) continue;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::fill_n(code.data() + (r * size_of(op.bases) + size_of(b)) * size_of(op.code_ld), op.code_ld, 0.0F);
    }
  }
  bases_used |= bases;
}

void HeadQueries::load(const Operation& op, int kv_head, const TokenBlock& block) {
  if (serial_ == op.serial && first_token_ == block.first && kv_head_ == kv_head) return;
  const AttentionArgs& args = op.args;
  serial_ = op.serial;
  first_token_ = block.first;
  kv_head_ = kv_head;
  rows_ = block.count * op.group;
  has_code_ = false;
  q_.reserve(size_of(rows_ * op.k_ld));
  for (int r = 0; r < rows_; ++r) {
    const std::int64_t token = block.first + r / op.group;
    const int head = kv_head * op.group + r % op.group;
    const float* in = args.q + token * args.q_token_stride + head * args.q_head_stride;
    float* out = q_.data() + r * op.k_ld;
    for (int d = 0; d < op.k_dim; ++d) out[d] = args.scale * in[d];
    std::fill(out + op.k_dim, out + op.k_ld, 0.0F);
  }
}

void HeadQueries::load_code(const Operation& op) {
  if (has_code_) return;
  has_code_ = true;
  code_q_.reserve(size_of(rows_ * op.k_ld));
  const CodeForm* form = op.integer ? op.k_codec->code_form(kv_head_) : nullptr;
  const int words = (form != nullptr) ? key_words(form->coded) : 0;
  if (form != nullptr) key_plan_ = key_word_plan(*form);
  words_.reserve(size_of(rows_ * words));
  integer_.resize(size_of(rows_));
  const float* matrix = (op.k_dim % kPanel == 0) ? op.k_codec->query_matrix(kv_head_) : nullptr;
  if (matrix != nullptr) {  // all rows at once, so that the matrix is read once
    const int columns = (form != nullptr) ? round_up(form->coded, kPanel) : op.k_dim;
    op.kernels->multiply(q_.data(), op.k_ld, rows_, op.k_dim, matrix, op.k_dim, columns, code_q_.data(), op.k_ld, false);
  }
  for (int r = 0; r < rows_; ++r) {
    const std::span<const float> q(q_.data() + r * op.k_ld, size_of(op.k_dim));
    float* out = code_q_.data() + r * op.k_ld;
    if (matrix == nullptr) {
      op.k_codec->query_to_inner(kv_head_, q, {out, q.size()});
      std::fill(out + op.k_dim, out + op.k_ld, 0.0F);
    }
    if (form != nullptr) integer_query(*form, out, words_.data() + r * words, integer_[size_of(r)]);
  }
  mean_.start(*op.kernels, op.means[kv_head_], q_.data(), op.k_ld, rows_);
}

void BlockWorker::run(const Operation& op, int first_head, int n_heads, const TokenBlock& block, std::int64_t begin,
                      std::int64_t end, std::int64_t step, BlockState* states) {
  op_ = &op;
  block_ = block;
  const int rows = block.count * op.group;
  scores_.reserve(size_of(rows * kTile));
  if (op.queries == nullptr) {
    if (heads_.size() < size_of(op.n_head_kv)) heads_.resize(size_of(op.n_head_kv));
    for (int h = first_head; h < first_head + n_heads; ++h) heads_[size_of(h)].load(op, h, block);
  }
  HeadQueries* queries = (op.queries != nullptr) ? op.queries : heads_.data();
  for (int h = 0; h < n_heads; ++h) states[h].start(op, rows);
  std::uint64_t misses = 0;
  if (op.integer && begin < end) {
    for (const std::int64_t column : {begin, begin + step}) fetch_books(column);
    for (int h = 0; h < n_heads; ++h) fetch_rows(begin, first_head + h, h, n_heads);
  }
  for (std::int64_t column = begin; column < end; column += step) {
    if (!plan_.build(op.args, *op.kernels, block, column)) continue;
    misses += plan_.misses();
    if (op.integer) fetch_books(column + 2 * step);
    for (int h = 0; h < n_heads; ++h) {
      if (op.integer && column + step < end) fetch_rows(column + step, first_head + h, h, n_heads);
      attend_tile(queries[first_head + h], states[h]);
    }
  }
  // Per cell and query: not once per head or layer.
  if (misses != 0 && first_head == 0 && op.args.layer_index == 0) op.args.cache->count_window_misses(misses);
}

// Asks for a part of the next tile's rows while this one is worked on: K and V alternate, which the processor's own prefetch
// follows badly, and all of it at once would wait for the memory. L2 is near enough; L1 is full of what is worked on.
void BlockWorker::fetch_rows(std::int64_t column, int kv_head, int part, int parts) const {
  const KvCache& cache = *op_->args.cache;
  const auto cells = static_cast<std::size_t>(std::min<std::int64_t>(kTile, op_->args.n_kv - column));
  const std::int64_t cell = op_->args.first_cell + column;
  constexpr std::size_t kLine = 64;
  for (const bool is_k : {true, false}) {
    const std::size_t stride = (is_k ? op_->k_codec : op_->v_codec)->row_bytes();
    const std::uint8_t* row = cache.code_rows(op_->args.layer_index, is_k) + static_cast<std::size_t>(cell) * stride;
    const std::size_t lines = (cells * stride + kLine - 1) / kLine;
    const std::size_t end = lines * size_of(part + 1) / size_of(parts);
    for (std::size_t i = lines * size_of(part) / size_of(parts); i < end; ++i) __builtin_prefetch(row + i * kLine, 0, 2);
  }
  const std::int32_t* slot = cache.cells().slot + cell;
  std::int32_t slots = -1;
  for (std::size_t j = 0; j < cells; ++j) slots &= slot[j];
  if (slots == -1) return;
  // Exact rows, of which a window's tile has many: those of one head.
  constexpr std::ptrdiff_t kLineValues = kLine / sizeof(std::uint16_t);
  for (const bool is_k : {true, false}) {
    const auto dim = static_cast<std::ptrdiff_t>(is_k ? op_->k_dim : op_->v_dim);
    const std::uint16_t* head = cache.exact_rows(op_->args.layer_index, is_k) + kv_head * dim;
    for (std::size_t j = 0; j < cells; ++j) {
      if (slot[j] < 0) continue;
      const std::uint16_t* row = head + slot[j] * op_->n_head_kv * dim;
      for (std::ptrdiff_t d = 0; d < dim; d += kLineValues) __builtin_prefetch(row + d, 0, 2);
    }
  }
}

// What the plan of a tile and fetch_rows() read.
void BlockWorker::fetch_books(std::int64_t column) const {
  if (column >= op_->args.n_kv) return;
  const KvCache::CellView cells = op_->args.cache->cells();
  const std::int64_t cell = op_->args.first_cell + column;
  constexpr int kLine = 16;  // words
  for (int j = 0; j < kTile; j += kLine) {
    __builtin_prefetch(cells.position + cell + j);
    __builtin_prefetch(cells.slot + cell + j);
  }
  __builtin_prefetch(cells.flags + cell);
  if (op_->args.mask == nullptr || block_.count > 1) return;
  const std::uint16_t* mask = op_->args.mask + block_.first * op_->args.mask_token_stride + column;
  for (int j = 0; j < kTile; j += 2 * kLine) __builtin_prefetch(mask + j);
}

void BlockWorker::attend_tile(HeadQueries& queries, BlockState& state) {
  const int rows = queries.rows();
  const int kv_head = queries.kv_head_;
  if (plan_.any_exact()) {
    find_exact_rows(op_->args, plan_, true, kv_head, op_->n_head_kv, op_->k_dim, k_rows_);
    find_exact_rows(op_->args, plan_, false, kv_head, op_->n_head_kv, op_->v_dim, v_rows_);
    exact_tile_.load_exact(*op_->kernels, k_rows_, op_->k_dim, op_->k_ld);
    exact_tile_.score(*op_->kernels, queries.q_.data(), rows, scores_.data());
  }
  if (plan_.any_code()) {
    queries.load_code(*op_);
    if (plan_.any_exact()) code_scores_.reserve(size_of(rows * kTile));
    score_codes(queries, plan_.any_exact() ? code_scores_.data() : scores_.data());
  }
  weighing_ = false;
  if (plan_.any_code() && op_->integer) {
    load_values(queries);
    weighing_ = !plan_.any_exact() && integer_tile_.one_basis();
    if (weighing_) integer_tile_.start_weights(rows);
  }
  for (int t = 0; t < block_.count; ++t) softmax_token(queries, t, state);
  add_values(queries, state);
}

void BlockWorker::load_values(const HeadQueries& queries) {
  const std::size_t stride = op_->v_codec->row_bytes();
  const std::uint8_t* row =
      op_->args.cache->code_rows(op_->args.layer_index, false) + static_cast<std::size_t>(plan_.cell(0)) * stride;
  integer_tile_.load_values(*op_->kernels, *op_->v_codec->code_form(queries.kv_head_), row, stride, plan_.n_cells());
}

void BlockWorker::score_codes(const HeadQueries& queries, float* s) {
  const Kernels& kernels = *op_->kernels;
  const AttentionArgs& args = op_->args;
  const int rows = queries.rows();
  const int kv_head = queries.kv_head_;
  const MeanTerm& mean = queries.mean_;
  if (op_->integer) {
    const std::size_t stride = op_->k_codec->row_bytes();
    const std::uint8_t* row = args.cache->code_rows(args.layer_index, true) + static_cast<std::size_t>(plan_.cell(0)) * stride;
    integer_tile_.load_keys(kernels, *op_->k_codec->code_form(kv_head), queries.key_plan_, row, stride, plan_.n_cells());
    if (!mean.empty()) mean.logits(kernels, plan_.code_positions(), phase_, s);
    integer_tile_.score(kernels, queries.words_.data(), queries.integer_.data(), rows, !mean.empty(), s);
    return;
  }
  code_tile_.load_codes(*op_->k_codec, args, plan_, true, kv_head, op_->k_dim, op_->k_ld);
  code_tile_.score(kernels, queries.code_q_.data(), rows, s);
  if (mean.empty()) return;
  mean_scores_.reserve(size_of(rows * kTile));
  mean.logits(kernels, plan_.code_positions(), phase_, mean_scores_.data());
  for (int i = 0; i < rows * kTile; ++i) s[i] += mean_scores_.data()[i];
}

// In a tile with both tiers: takes each cell's logit from the tier that the token reads.
void BlockWorker::merge_tiers(int token, int row) {
  float* s = scores_.data() + row * kTile;
  const float* code = code_scores_.data() + row * kTile;
  const std::uint32_t* select = plan_.select_code(token);
  for (int j = 0; j < kTile; ++j) s[j] = (select[j] != 0) ? code[j] : s[j];
}

void BlockWorker::softmax_token(const HeadQueries& queries, int token, BlockState& state) {
  const AttentionArgs& args = op_->args;
  const bool mixed = plan_.any_exact() && plan_.any_code();
  for (int h = 0; h < op_->group; ++h) {
    const int row = token * op_->group + h;
    float* s = scores_.data() + row * kTile;
    float* code = mixed ? code_scores_.data() + row * kTile : nullptr;
    if (!plan_.visible(token)) {
      if (weighing_) integer_tile_.weigh_nothing(row);
      std::fill_n(s, kTile, 0.0F);
      if (mixed) std::fill_n(code, kTile, 0.0F);
      continue;
    }
    if (mixed) merge_tiers(token, row);
    const float slope = (args.slopes != nullptr) ? args.slopes[queries.kv_head_ * op_->group + h] : 1.0F;
    const float tile_max = op_->kernels->logits(s, plan_.bias(token), slope, args.softcap);
    BlockState::Row& total = state.rows[size_of(row)];
    if (std::max(total.reference, tile_max) == kInvisible) {  // all are -inf, or NaN, which comparisons overlook
      if (std::any_of(s, s + kTile, [](float x) { return std::isnan(x); }))
        total.reference = std::numeric_limits<float>::quiet_NaN();
      if (weighing_) integer_tile_.weigh_nothing(row);
      std::fill_n(s, kTile, 0.0F);
      if (mixed) std::fill_n(code, kTile, 0.0F);
      continue;
    }
    if (tile_max > total.reference + kHeadroom) rescale(state, row, tile_max);
    const auto sum =
        static_cast<double>(weighing_ ? integer_tile_.weigh(*op_->kernels, row, s, total.reference, total.code_weight.data())
                                      : op_->kernels->exponentials(s, total.reference));
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

void BlockWorker::rescale(BlockState& state, int row, float reference) const {
  BlockState::Row& total = state.rows[size_of(row)];
  const float factor = std::exp(total.reference - reference);  // 0 for the first cells
  total.reference = reference;
  total.sum *= static_cast<double>(factor);
  total.code_sum *= static_cast<double>(factor);
  for (double& weight : total.code_weight) weight *= static_cast<double>(factor);
  const auto scale = [&](float* x, int n) {
    for (int d = 0; d < n; ++d) x[d] *= factor;
  };
  if (state.any_exact) scale(state.exact.data() + row * op_->v_ld, op_->v_ld);
  for (int b = 0; b < op_->bases; ++b) {
    if ((state.bases_used >> b & 1U) != 0) scale(state.code.data() + (row * op_->bases + b) * op_->code_ld, op_->code_ld);
  }
}

void BlockWorker::add_values(const HeadQueries& queries, BlockState& state) {
  const Kernels& kernels = *op_->kernels;
  const AttentionArgs& args = op_->args;
  const int rows = queries.rows();
  const int kv_head = queries.kv_head_;
  if (plan_.any_exact()) {
    state.use_exact(*op_);
    exact_tile_.load_exact(kernels, v_rows_, op_->v_dim, op_->v_ld);
    exact_tile_.add_values(kernels, scores_.data(), rows, state.exact.data());
  }
  if (!plan_.any_code()) return;
  const float* p = plan_.any_exact() ? code_scores_.data() : scores_.data();
  if (weighing_) {
    state.use_bases(*op_, integer_tile_.bases_used());
    integer_tile_.add_weighed(kernels, rows, state.code.data());
  } else if (op_->integer) {
    state.use_bases(*op_, integer_tile_.bases_used());
    constexpr std::ptrdiff_t kStride = sizeof(BlockState::Row) / sizeof(double);
    integer_tile_.add_values(kernels, p, rows, state.code.data(), state.rows.front().code_weight.data(), kStride);
  } else {
    state.use_bases(*op_, 1U);
    code_tile_.load_codes(*op_->v_codec, args, plan_, false, kv_head, op_->v_dim, op_->v_ld);
    code_tile_.add_values(kernels, p, rows, state.code.data());
  }
}

void BlockWorker::finish(const Operation& op, int kv_head, const TokenBlock& block, int r, const BlockState* states,
                         std::int64_t n, std::int64_t step) {
  const AttentionArgs& args = op.args;
  const Kernels& kernels = *op.kernels;
  const std::int64_t token = block.first + r / op.group;
  const int head = kv_head * op.group + r % op.group;
  float* out = args.out + token * args.out_token_stride + head * args.out_head_stride;
  const std::size_t row = size_of(r);
  float reference = kInvisible;
  for (std::int64_t i = 0; i < n; ++i) {
    const float other = states[i * step].rows[row].reference;
    reference = std::isnan(other) ? other : std::max(reference, other);  // a NaN stays
  }
  if (reference == kInvisible) {
    std::fill_n(out, op.v_dim, 0.0F);
    return;
  }
  double sum = 0.0;
  double code_sum = 0.0;
  std::array<double, kMaxBases> code_weight{};
  exact_terms_.clear();
  for (Terms& terms : code_terms_) terms.clear();
  for (std::int64_t i = 0; i < n; ++i) {
    const BlockState& state = states[i * step];
    const BlockState::Row& part = state.rows[row];
    if (part.reference == kInvisible) continue;
    const float scale = std::exp(part.reference - reference);
    const auto factor = static_cast<double>(scale);
    sum += factor * part.sum;
    code_sum += factor * part.code_sum;
    if (state.any_exact) exact_terms_.add(state.exact.data() + row * size_of(op.v_ld), scale);
    for (std::size_t b = 0; b < size_of(op.bases); ++b) {
      if ((state.bases_used >> b & 1U) == 0) continue;
      code_weight[b] += factor * part.code_weight[b];
      code_terms_[b].add(state.code.data() + (row * size_of(op.bases) + b) * size_of(op.code_ld), scale);
    }
  }
  double denominator = sum;
  double numerator = 1.0;
  if (args.sinks != nullptr) {
    const auto sink = static_cast<double>(args.sinks[head]);
    const auto at = static_cast<double>(reference);
    // The sink may be far above every logit: keep both exponents at or below 0.
    const double top = std::max(sink, at);
    numerator = std::exp(at - top);
    denominator = sum * numerator + std::exp(sink - top);
  }
  const double factor = numerator / denominator;
  exact_terms_.sum(kernels, op.v_ld, merged_);
  for (int d = 0; d < op.v_dim; ++d) out[d] = static_cast<float>(factor * static_cast<double>(merged_.data()[d]));
  if (code_sum == 0.0) return;
  head_row_.resize(size_of(op.v_dim));
  if (op.integer) {
    for (std::size_t b = 0; b < size_of(op.bases); ++b) {
      if (code_weight[b] == 0.0) continue;
      code_terms_[b].sum(kernels, op.code_ld, merged_);
      sums_to_basis(*op.v_codec->code_form(kv_head), merged_.data(), code_weight[b], factor, head_row_);
      op.v_codec->basis_to_output(kv_head, static_cast<int>(b), head_row_, {out, size_of(op.v_dim)});
    }
    return;
  }
  code_terms_.front().sum(kernels, op.code_ld, merged_);
  for (int d = 0; d < op.v_dim; ++d)
    head_row_[size_of(d)] = static_cast<float>(factor * static_cast<double>(merged_.data()[d]));
  op.v_codec->inner_to_output(kv_head, head_row_, factor * code_sum, {out, size_of(op.v_dim)});
}

void BlockWorker::Terms::clear() {
  rows.clear();
  weights.clear();
}

void BlockWorker::Terms::add(const float* row, float weight) {
  rows.push_back(row);
  weights.push_back(weight);
}

void BlockWorker::Terms::sum(const Kernels& kernels, int columns, FloatBuffer& out) const {
  out.reserve(size_of(columns));
  kernels.weighted_sum(rows.data(), weights.data(), static_cast<int>(rows.size()), columns, out.data());
}

}  // namespace oscar::attention

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/method/moments.h"

namespace oscar {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU;
constexpr std::uint32_t kInfinity = 0x7F800000U;
constexpr std::uint32_t kHalfOverflow = 0x477FF000U;  // the smallest |x| that binary16 rounds to infinity: 65520

// Integer compare: vectorises without -ffast-math, and NaN counts as the largest of all.
std::uint32_t largest_magnitude(const float* values, int n) {
  std::uint32_t largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & kMagnitude);
  return largest;
}

float rounded_to_half(float value) { return half_to_float(float_to_half(value)); }

// cos and sin that undo a block's RoPE, shared by all heads of the layer: [rows][pair]. The magnitude is divided out too.
struct UndoTable {
  std::vector<double> cosine, sine;

  UndoTable(const Rope& rope, std::span<const std::int32_t> positions) {
    cosine.reserve(positions.size() * rope.theta().size());
    sine.reserve(cosine.capacity());
    for (const std::int32_t position : positions) {
      for (const double theta : rope.theta()) {
        const double angle = static_cast<double>(position) * theta;
        cosine.push_back(std::cos(angle) / rope.magnitude());
        sine.push_back(std::sin(angle) / rope.magnitude());
      }
    }
  }
};

// Adds x^T x to the lower triangle; finish() mirrors it.
template <class Rows>
void add_products(MatrixD& moment, const Rows& rows) {
  moment.selfadjointView<Eigen::Lower>().rankUpdate(rows.transpose());
}

void mirror(MatrixD& moment) { moment.triangularView<Eigen::StrictlyUpper>() = moment.transpose(); }

void validate(const LayerShape& s, const CollectorConfig& c) {
  if (s.n_head_kv <= 0 || s.n_head <= 0 || s.n_head % s.n_head_kv != 0 || s.k_dim <= 0 || s.v_dim <= 0) {
    fail("layer {}: impossible geometry: {} query heads, {} KV heads, head sizes {} and {}", s.layer, s.n_head, s.n_head_kv,
         s.k_dim, s.v_dim);
  }
  if (c.pilot_tokens < 1) fail("layer {}: pilot_tokens is {}, at least 1 is needed", s.layer, c.pilot_tokens);
  if (c.warmup_tokens < 0) fail("layer {}: warmup_tokens is {}, it cannot be negative", s.layer, c.warmup_tokens);
  if (c.max_samples < 1) fail("layer {}: max_samples is {}, at least 1 is needed", s.layer, c.max_samples);
}

}  // namespace

// What one head holds beside its sums. At most kMomentBlock rows of everything, and pilot_tokens rows of K and V.
struct MomentCollector::Pending {
  Rope rope;
  int rows = 0;        // tokens in the open block
  MatrixF q, k, v, o;  // [kMomentBlock * g, D], [kMomentBlock, D], [kMomentBlock, Dv], [kMomentBlock * g, Dv]
  std::vector<std::int32_t> positions;

  MatrixD metric;  // C_h, [D, D]; empty until the pilot is frozen
  std::vector<std::uint16_t> pilot_k, pilot_v;
  std::int64_t pilot_rows = 0;

  std::int64_t seen = 0;    // counted tokens, open block included
  std::int64_t stride = 1;  // every stride-th counted token is a sample

  Pending(const LayerShape& shape, int group) : rope(shape.rope, shape.k_dim) {
    const Eigen::Index stacked = static_cast<Eigen::Index>(kMomentBlock) * group;
    q.resize(stacked, shape.k_dim);
    k.resize(kMomentBlock, shape.k_dim);
    v.resize(kMomentBlock, shape.v_dim);
    o.resize(stacked, shape.v_dim);
    positions.resize(kMomentBlock);
  }

  void append(const Block& b, std::int64_t token, int head, int group) {
    for (int i = 0; i < group; ++i) {
      const std::int64_t query_head = static_cast<std::int64_t>(head) * group + i;
      copy_row(q, static_cast<Eigen::Index>(rows) * group + i, b.q + token * b.q_token + query_head * b.q_head);
      copy_row(o, static_cast<Eigen::Index>(rows) * group + i, b.o + token * b.o_token + query_head * b.o_head);
    }
    copy_row(k, rows, b.k + token * b.k_token + head * b.k_head);
    copy_row(v, rows, b.v + token * b.v_token + head * b.v_head);
    positions[static_cast<std::size_t>(rows)] = b.positions[token];
    ++rows;
  }

  // The newest row of the open block becomes a sample when its turn has come. head.k_samples and v_samples hold spare rows
  // at their end until finish().
  void sample(HeadMoments& head, std::int64_t max_samples) {
    const std::int64_t turn = seen++;
    std::vector<std::int32_t>& kept = head.sample_positions;
    if (turn % stride == 0 && static_cast<std::int64_t>(kept.size()) == max_samples) {  // full: keep every second one
      for (std::size_t i = 0; 2 * i < kept.size(); ++i) {
        const auto to = static_cast<Eigen::Index>(i);
        head.k_samples.row(to) = head.k_samples.row(2 * to);
        head.v_samples.row(to) = head.v_samples.row(2 * to);
        kept[i] = kept[2 * i];
      }
      kept.resize((kept.size() + 1) / 2);
      stride *= 2;
    }
    if (turn % stride != 0 || static_cast<std::int64_t>(kept.size()) == max_samples) return;
    const auto row = static_cast<Eigen::Index>(kept.size());
    if (row == head.k_samples.rows()) {
      const Eigen::Index capacity = std::min<Eigen::Index>(max_samples, std::max<Eigen::Index>(64, 2 * row));
      head.k_samples.conservativeResize(capacity, k.cols());
      head.v_samples.conservativeResize(capacity, v.cols());
    }
    // As the codec will see them: a cache row is rounded to binary16 before it is coded.
    head.k_samples.row(row) = k.row(rows - 1).unaryExpr(&rounded_to_half);
    head.v_samples.row(row) = v.row(rows - 1).unaryExpr(&rounded_to_half);
    kept.push_back(positions[static_cast<std::size_t>(rows - 1)]);
  }

  void add_pre_rope(const UndoTable& table, VectorD& sum) const {
    const std::size_t pairs = rope.theta().size();
    for (int row = 0; row < rows; ++row) {
      const double* c = table.cosine.data() + static_cast<std::size_t>(row) * pairs;
      const double* s = table.sine.data() + static_cast<std::size_t>(row) * pairs;
      for (std::size_t i = 0; i < pairs; ++i) {
        const auto first = static_cast<Eigen::Index>(rope.first_of(i));
        const auto second = static_cast<Eigen::Index>(rope.second_of(i));
        const auto x = static_cast<double>(k(row, first));
        const auto y = static_cast<double>(k(row, second));
        sum[first] += x * c[i] + y * s[i];
        sum[second] += y * c[i] - x * s[i];
      }
    }
    const Eigen::Index plain = k.cols() - 2 * static_cast<Eigen::Index>(pairs);
    sum.tail(plain) += k.block(0, 2 * static_cast<Eigen::Index>(pairs), rows, plain).cast<double>().colwise().sum();
  }

  // w_t = k_t C_h k_t^T; C_h is positive semi-definite, so a negative weight is rounding.
  void add_weighted(HeadMoments& head, const MatrixD& keys, const MatrixD& values) const {
    const Eigen::VectorXd weights = ((keys * metric).cwiseProduct(keys)).rowwise().sum().cwiseMax(0.0);
    head.sst_weight += weights.sum();
    const MatrixD weighted = weights.cwiseSqrt().asDiagonal() * values;
    add_products(head.sst_moment, weighted);
  }

  void freeze_pilot(HeadMoments& head) {
    metric = head.q_moment.selfadjointView<Eigen::Lower>();
    if (head.queries > 0) metric /= static_cast<double>(head.queries);
    const Eigen::Index k_dim = k.cols();
    const Eigen::Index v_dim = v.cols();
    for (std::int64_t begin = 0; begin < pilot_rows; begin += kMomentBlock) {
      const auto n = static_cast<Eigen::Index>(std::min<std::int64_t>(kMomentBlock, pilot_rows - begin));
      MatrixD keys(n, k_dim);
      MatrixD values(n, v_dim);
      widen(pilot_k.data() + begin * k_dim, keys);
      widen(pilot_v.data() + begin * v_dim, values);
      add_weighted(head, keys, values);
    }
    pilot_k = {};
    pilot_v = {};
  }

  void flush(HeadMoments& head, int group, const UndoTable& table, std::int64_t pilot_tokens) {
    if (rows == 0) return;
    const Eigen::Index stacked = static_cast<Eigen::Index>(rows) * group;
    const MatrixD queries = q.topRows(stacked).cast<double>();
    const MatrixD outputs = o.topRows(stacked).cast<double>();
    const MatrixD keys = k.topRows(rows).cast<double>();
    const MatrixD values = v.topRows(rows).cast<double>();
    add_products(head.q_moment, queries);
    add_products(head.o_moment, outputs);
    add_products(head.k_moment, keys);
    add_products(head.v_moment, values);
    head.k_sum += keys.colwise().sum();
    head.v_sum += values.colwise().sum();
    add_pre_rope(table, head.k_pre_sum);
    head.tokens += rows;
    head.queries += stacked;
    if (metric.size() != 0) {
      add_weighted(head, keys, values);
    } else {
      narrow(k, pilot_k);
      narrow(v, pilot_v);
      pilot_rows += rows;
      if (pilot_rows >= pilot_tokens) freeze_pilot(head);
    }
    rows = 0;
  }

 private:
  static void copy_row(MatrixF& to, Eigen::Index row, const float* from) {
    std::memcpy(to.row(row).data(), from, static_cast<std::size_t>(to.cols()) * sizeof(float));
  }
  void narrow(const MatrixF& from, std::vector<std::uint16_t>& to) const {
    const float* values = from.data();
    for (Eigen::Index i = 0; i < rows * from.cols(); ++i) to.push_back(float_to_half(values[i]));
  }
  static void widen(const std::uint16_t* from, MatrixD& to) {
    for (Eigen::Index i = 0; i < to.size(); ++i) to.data()[i] = static_cast<double>(half_to_float(from[i]));
  }
};

MomentCollector::MomentCollector(LayerShape shape, CollectorConfig config) : shape_(std::move(shape)), config_(config) {
  validate(shape_, config_);
  const int group = shape_.n_head / shape_.n_head_kv;
  HeadMoments empty;
  for (MatrixD* m : {&empty.q_moment, &empty.k_moment}) *m = MatrixD::Zero(shape_.k_dim, shape_.k_dim);
  for (MatrixD* m : {&empty.v_moment, &empty.o_moment, &empty.sst_moment}) *m = MatrixD::Zero(shape_.v_dim, shape_.v_dim);
  for (VectorD* v : {&empty.k_sum, &empty.k_pre_sum}) *v = VectorD::Zero(shape_.k_dim);
  empty.v_sum = VectorD::Zero(shape_.v_dim);
  heads_.assign(static_cast<std::size_t>(shape_.n_head_kv), empty);
  for (int head = 0; head < shape_.n_head_kv; ++head) pending_.push_back(std::make_shared<Pending>(shape_, group));
}

std::string MomentCollector::check(const Block& block) const {
  struct Tensor {
    const char* name;
    const float* data;
    std::int64_t token, head;
    int heads, dim;
    std::uint32_t limit;
  };
  // Keys and values must fit the 16-bit cache whose rows are going to be coded; queries and outputs only have to be finite.
  const Tensor tensors[] = {
      {"query", block.q, block.q_token, block.q_head, shape_.n_head, shape_.k_dim, kInfinity},
      {"key", block.k, block.k_token, block.k_head, shape_.n_head_kv, shape_.k_dim, kHalfOverflow},
      {"value", block.v, block.v_token, block.v_head, shape_.n_head_kv, shape_.v_dim, kHalfOverflow},
      {"attention output", block.o, block.o_token, block.o_head, shape_.n_head, shape_.v_dim, kInfinity},
  };
  if (block.n > 0 && block.positions == nullptr) return fmt::format("layer {}: a block without positions", shape_.layer);
  for (const Tensor& t : tensors) {
    if (block.n > 0 && t.data == nullptr) return fmt::format("layer {}: a block without its {} rows", shape_.layer, t.name);
    for (std::int64_t token = 0; token < block.n; ++token) {
      for (int head = 0; head < t.heads; ++head) {
        const std::uint32_t largest = largest_magnitude(t.data + token * t.token + head * t.head, t.dim);
        if (largest < t.limit) continue;
        const char* what = largest > kInfinity    ? "contains NaN"
                           : largest == kInfinity ? "contains an infinite value"
                                                  : "contains a value beyond binary16 (65504)";
        return fmt::format("layer {}: the {} of token {} (position {}), head {}, {}", shape_.layer, t.name, token,
                           block.positions[token], head, what);
      }
    }
  }
  return {};
}

void MomentCollector::add(const Block& block, int head_begin, int head_end) {
  if (head_begin < 0 || head_end > shape_.n_head_kv || head_begin > head_end) {
    fail("layer {}: heads {}..{} of {}", shape_.layer, head_begin, head_end, shape_.n_head_kv);
  }
  if (head_begin == head_end) return;
  const int group = shape_.n_head / shape_.n_head_kv;
  const auto begin = static_cast<std::size_t>(head_begin);
  const auto end = static_cast<std::size_t>(head_end);
  for (std::int64_t token = 0; token < block.n; ++token) {
    if (block.positions[token] < config_.warmup_tokens) continue;
    for (std::size_t h = begin; h < end; ++h) {
      pending_[h]->append(block, token, static_cast<int>(h), group);
      pending_[h]->sample(heads_[h], config_.max_samples);
    }
    if (pending_[begin]->rows < kMomentBlock) continue;
    const UndoTable table(pending_[begin]->rope, pending_[begin]->positions);  // every head saw the same positions
    for (std::size_t h = begin; h < end; ++h) pending_[h]->flush(heads_[h], group, table, config_.pilot_tokens);
  }
}

std::vector<HeadMoments> MomentCollector::take_heads() {
  finish();
  return std::move(heads_);
}

void MomentCollector::finish() {
  const int group = shape_.n_head / shape_.n_head_kv;
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    Pending& pending = *pending_[h];
    HeadMoments& head = heads_[h];
    const UndoTable table(pending.rope, std::span(pending.positions).first(static_cast<std::size_t>(pending.rows)));
    pending.flush(head, group, table, config_.pilot_tokens);
    if (pending.metric.size() == 0) pending.freeze_pilot(head);
    for (MatrixD* m : {&head.q_moment, &head.k_moment, &head.v_moment, &head.o_moment, &head.sst_moment}) mirror(*m);
    const auto samples = static_cast<Eigen::Index>(head.sample_positions.size());
    head.k_samples.conservativeResize(samples, shape_.k_dim);
    head.v_samples.conservativeResize(samples, shape_.v_dim);
  }
}

}  // namespace oscar

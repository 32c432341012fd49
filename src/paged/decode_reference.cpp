#include "oscar/paged/decode_reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "oscar/base/half.h"
#include "oscar/method/rotation.h"

namespace oscar::paged {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

double key_gain(int byte) { return byte == 0 ? 0.0 : std::exp2((byte - 128) / 16.0); }
double value_gain(int byte) { return byte % kValueGains == 0 ? 0.0 : std::exp2((byte % kValueGains - 40) / 8.0); }

struct Grid {
  double step, lo;
};
// Of a token, from the grids of a head's keys or values.
Grid grid(const std::uint8_t* grids, int token) {
  std::uint16_t halves[2];
  std::memcpy(halves, grids + grid_byte(token), sizeof halves);
  return {static_cast<double>(half_to_float(halves[0])), static_cast<double>(half_to_float(halves[1]))};
}

double digit(const std::uint8_t* bytes, DigitPlace place) {
  return static_cast<double>((static_cast<unsigned>(bytes[place.byte]) >> place.shift) & 3U);
}

// A sequence's keys and values of one KV head, as one query head sees them.
class Sequence {
 public:
  Sequence(const DecodeProblem& problem, int sequence, int head, int query)
      : p_(problem), t_(key_tables(problem)), sequence_(sequence), kv_(head / problem.group), dim_(t_.layout.head_dim) {
    const std::size_t n_head = size_of(t_.layout.n_head_kv * p_.group);
    const std::size_t token = size_of(sequence) * size_of(p_.queries) + size_of(query);
    const std::uint16_t* row = p_.q + (token * n_head + size_of(head)) * size_of(dim_);
    for (int d = 0; d < dim_; ++d) q_.push_back(static_cast<double>(half_to_float(row[d])));
    std::vector<double> inner(size_of(dim_), 0.0);
    for (int d = 0; d < dim_; ++d) {
      for (int i = 0; i < dim_; ++i) inner[size_of(i)] += q_[size_of(d)] * static_cast<double>(t_.query[size_of(kv_)](d, i));
    }
    for (const std::uint16_t source : t_.slot_source[size_of(kv_)])
      slot_query_.push_back(inner[source % 4096U] * static_cast<double>(1U << (2U * (source / 4096U))));
    for (int d = 0; d < dim_; ++d) constant_ += q_[size_of(d)] * static_cast<double>(t_.key_constant(kv_, d));
  }

  [[nodiscard]] double coded_logit(int position) const {
    const int token = position % kPageTokens;
    const int slots = static_cast<int>(slot_query_.size());
    const std::uint8_t* keys = head_block(position);
    const std::uint8_t* row_data = keys + key_bytes(slots) + value_bytes(dim_);
    const bool int2 = t_.layout.codec == PageCodec::int2;
    const Grid g = int2 ? grid(row_data, token) : Grid{key_gain(row_data[gain_byte(token)]), 0};
    const double centre = int2 ? 0 : 1.5;
    double logit = constant_;
    for (int s = 0; s < slots; ++s)
      logit += slot_query_[size_of(s)] * (g.lo + g.step * (digit(keys, key_digit(slots, token, s)) - centre));
    for (std::size_t i = 0; i < t_.theta.size(); ++i) {
      const double c = std::cos(position * t_.theta[i]);
      const double s = std::sin(position * t_.theta[i]);
      const auto first = static_cast<double>(t_.mean_first(kv_, static_cast<Eigen::Index>(i)));
      const auto second = static_cast<double>(t_.mean_second(kv_, static_cast<Eigen::Index>(i)));
      logit += q_[t_.pair_first[i]] * (first * c - second * s) + q_[t_.pair_second[i]] * (first * s + second * c);
    }
    return capped(p_.scale * logit);
  }
  [[nodiscard]] double exact_logit(int position) const {
    double dot = 0;
    for (int d = 0; d < dim_; ++d) dot += q_[size_of(d)] * exact_value(position, 0, d);
    return capped(p_.scale * dot);
  }
  // out += weight * v, coded rows in the basis of the pattern that the row names; `int2` has one.
  void add_coded(int position, double weight, std::array<std::vector<double>, kPatterns>& sums) const {
    const int token = position % kPageTokens;
    const std::uint8_t* values = head_block(position) + key_bytes(static_cast<int>(slot_query_.size()));
    if (t_.layout.codec == PageCodec::int2) {
      const Grid g = grid(values + value_bytes(dim_) + row_data_bytes(PageCodec::int2), token);
      for (int d = 0; d < dim_; ++d)
        sums[0][size_of(d)] += weight * (g.lo + g.step * digit(values, value_digit(dim_, token, d)));
      return;
    }
    const int gain = values[value_bytes(dim_) + kPageTokens + gain_byte(token)];
    std::vector<double>& out = sums[size_of(gain / kValueGains)];
    weight *= value_gain(gain) * static_cast<double>(p_.tables->value_unit[size_of(kv_)]);
    for (int d = 0; d < dim_; ++d) out[size_of(d)] += weight * (digit(values, value_digit(dim_, token, d)) - 1.5);
  }
  void add_exact(int position, double weight, std::vector<double>& out) const {
    for (int d = 0; d < dim_; ++d) out[size_of(d)] += weight * exact_value(position, 1, d);
  }

 private:
  [[nodiscard]] double capped(double logit) const {
    const auto cap = static_cast<double>(p_.soft_cap);
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }
  [[nodiscard]] const std::uint8_t* head_block(int position) const {
    const std::int64_t page = p_.page_table[sequence_ * static_cast<std::ptrdiff_t>(p_.page_columns) + position / kPageTokens];
    return p_.pages + static_cast<std::size_t>(page) * t_.layout.page_bytes + t_.layout.head_offset[size_of(kv_)];
  }
  [[nodiscard]] double exact_value(int position, int which, int d) const {
    const int columns = p_.sink / kBlockTokens + p_.ring;
    const std::int64_t block =
        p_.block_table[sequence_ * static_cast<std::ptrdiff_t>(columns) + block_column(position, p_.sink, p_.ring)];
    const std::size_t head = static_cast<std::size_t>(block) * size_of(t_.layout.n_head_kv) + size_of(kv_);
    const std::size_t start = (2 * head + size_of(which)) * size_of(kBlockTokens * dim_);
    return static_cast<double>(half_to_float(p_.blocks[start + exact_index(dim_, position % kBlockTokens, d)]));
  }

  const DecodeProblem& p_;
  const KeyTables& t_;
  int sequence_, kv_, dim_;
  std::vector<double> q_, slot_query_;
  double constant_ = 0;
};

// out += sums of coded values, back in the model's basis.
void add_spectral(const SpectralTables& tables, int kv, const std::array<std::vector<double>, kPatterns>& sums,
                  std::vector<double>& out) {
  const int dim = tables.layout.head_dim;
  const int heads = tables.layout.n_head_kv;
  const MatrixD h = hadamard(dim);
  for (int d = 0; d < dim; ++d) {
    for (int p = 0; p < kPatterns; ++p) {
      double turned = 0;
      for (int i = 0; i < dim; ++i) turned += h(d, i) * sums[size_of(p)][size_of(i)];
      out[size_of(d)] += turned * static_cast<double>(tables.value_signs(p * heads + kv, d));
    }
  }
}
void add_int2(const Int2Tables& tables, int kv, const std::vector<double>& sum, double weight, std::vector<double>& out) {
  const int dim = tables.layout.head_dim;
  for (int d = 0; d < dim; ++d) {
    for (int i = 0; i < dim; ++i)
      out[size_of(d)] += sum[size_of(i)] * static_cast<double>(tables.value_output[size_of(kv)](i, d));
    if (tables.value_mean.size() != 0) out[size_of(d)] += weight * static_cast<double>(tables.value_mean(kv, d));
  }
}

}  // namespace

DecodeRow decode_reference(const DecodeProblem& problem, int sequence, int head, int query) {
  const int dim = key_tables(problem).layout.head_dim;
  const int n = seen_by(problem.lengths[sequence], query, problem.queries);
  const Sequence rows(problem, sequence, head, query);
  const double infinity = std::numeric_limits<double>::infinity();
  const auto is_coded = [&](int t) { return t >= problem.sink && n - t > problem.recent; };

  std::vector<double> logits;
  logits.reserve(size_of(std::max(n, 0)));
  for (int t = 0; t < n; ++t) logits.push_back(is_coded(t) ? rows.coded_logit(t) : rows.exact_logit(t));
  const double sink = problem.sinks != nullptr ? static_cast<double>(problem.sinks[head]) : -infinity;
  double max = sink;
  for (const double x : logits) max = std::max(max, x);
  DecodeRow row{std::vector<double>(size_of(dim), 0.0), -infinity};
  if (max == -infinity) return row;

  std::array<std::vector<double>, kPatterns> coded;
  coded.fill(std::vector<double>(size_of(dim), 0.0));
  double sum = std::exp(sink - max);
  double coded_sum = 0;
  for (int t = 0; t < n; ++t) {
    const double p = std::exp(logits[size_of(t)] - max);
    sum += p;
    if (is_coded(t)) {
      rows.add_coded(t, p, coded);
      coded_sum += p;
    } else {
      rows.add_exact(t, p, row.out);
    }
  }
  const int kv = head / problem.group;
  if (problem.int2_tables != nullptr) {
    add_int2(*problem.int2_tables, kv, coded[0], coded_sum, row.out);
  } else {
    add_spectral(*problem.tables, kv, coded, row.out);
  }
  for (double& x : row.out) x /= sum;
  row.lse = max + std::log(sum);
  return row;
}

}  // namespace oscar::paged

#include "oscar/method/importance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/half.h"

namespace oscar {
namespace {

constexpr std::int32_t kOffsets = 256;
constexpr std::int32_t kOffsetStep = 96;  // offsets reach 24576
constexpr Eigen::Index kTileKeys = 256;

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

std::uint64_t mixed_bits(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

int offset_index(std::int64_t position, int copy) {
  return static_cast<int>(mixed_bits(static_cast<std::uint64_t>(2 * position + copy)) % kOffsets);
}

// Turns rows on by offsets from a table of sines, which is the same for all rows, heads and layers of one RoPE.
class OffsetTurns {
 public:
  explicit OffsetTurns(const Rope& rope) : rope_(rope) {
    const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
    cosine_.resize(kOffsets, pairs);
    sine_.resize(kOffsets, pairs);
    for (int i = 0; i < kOffsets; ++i) {
      for (Eigen::Index pair = 0; pair < pairs; ++pair) {
        const double angle = static_cast<double>(i) * kOffsetStep * rope.theta()[static_cast<std::size_t>(pair)];
        cosine_(i, pair) = static_cast<float>(std::cos(angle));
        sine_(i, pair) = static_cast<float>(std::sin(angle));
      }
    }
  }
  template <class Row>
  void turn(int index, const Row& in, float* out) const {
    std::copy_n(in.data(), in.size(), out);
    for (std::size_t pair = 0; pair < rope_.theta().size(); ++pair) {
      const auto first = static_cast<Eigen::Index>(rope_.first_of(pair));
      const auto second = static_cast<Eigen::Index>(rope_.second_of(pair));
      const float c = cosine_(index, static_cast<Eigen::Index>(pair));
      const float s = sine_(index, static_cast<Eigen::Index>(pair));
      out[first] = in[first] * c - in[second] * s;
      out[second] = in[first] * s + in[second] * c;
    }
  }

 private:
  const Rope& rope_;
  MatrixF cosine_, sine_;
};

void widen_rows(const std::uint16_t* cache, const std::int64_t* cells, std::int64_t width, std::int64_t offset, MatrixF& rows) {
  for (Eigen::Index i = 0; i < rows.rows(); ++i) {
    const std::uint16_t* in = cache + cells[i] * width + offset;
    float* out = rows.row(i).data();
    for (Eigen::Index d = 0; d < rows.cols(); ++d) out[d] = half_to_float(in[d]);
  }
}

// Keeps `keep` of the head's samples, evenly spaced.
void thin_samples(HeadImportance& head, std::int64_t keep) {
  const auto have = static_cast<std::int64_t>(head.sample_positions.size());
  if (keep >= have) return;
  const std::size_t dim = head.sample_keys.size() / size_of(have);
  for (std::int64_t i = 0; i < keep; ++i) {
    const std::size_t from = size_of(i * have / keep);
    std::copy_n(head.sample_keys.begin() + static_cast<std::ptrdiff_t>(from * dim), dim,
                head.sample_keys.begin() + static_cast<std::ptrdiff_t>(size_of(i) * dim));
    head.sample_weights[size_of(i)] = head.sample_weights[from];
    head.sample_positions[size_of(i)] = head.sample_positions[from];
  }
  head.sample_keys.resize(size_of(keep) * dim);
  head.sample_weights.resize(size_of(keep));
  head.sample_positions.resize(size_of(keep));
}

}  // namespace

// One KV head's part of the running sequence, and the scratch of a block.
struct ImportanceCollector::Sequence {
  std::vector<std::uint16_t> keys;      // [tokens, D]
  std::vector<double> weight;           // [tokens] w_.j
  std::vector<std::vector<float>> vmv;  // [group][tokens] |W_o v_j|^2
  OffsetTurns turns;

  Sequence(const Rope& rope, int query_heads) : vmv(static_cast<std::size_t>(query_heads)), turns(rope), group(query_heads) {}

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(weight.size()); }

  // Takes the block's rows in. Query head i's tokens become rows i * n .. i * n + n - 1.
  void load(const Block& b, const LayerShape& shape, int head, const std::vector<float>* metric) {
    block = &b;
    k_dim = shape.k_dim;
    v_dim = shape.v_dim;
    k_width = std::int64_t{shape.n_head_kv} * k_dim;
    v_width = std::int64_t{shape.n_head_kv} * v_dim;
    kv_head = head;
    n = b.n;
    for (std::int64_t t = b.first; t < b.first + n; ++t) {
      const std::uint16_t* row = b.k + b.cells[t] * k_width + head * k_dim;
      keys.insert(keys.end(), row, row + k_dim);
    }
    weight.resize(size_of(b.first + n), 0.0);
    queries.resize(n * group, k_dim);
    outputs.resize(n * group, v_dim);
    for (int i = 0; i < group; ++i) {
      const std::int64_t query_head = std::int64_t{head} * group + i;
      for (Eigen::Index t = 0; t < n; ++t) {
        std::copy_n(b.q + t * b.q_token + query_head * b.q_head, k_dim, queries.row(i * n + t).data());
        std::copy_n(b.o + t * b.o_token + query_head * b.o_head, v_dim, outputs.row(i * n + t).data());
      }
    }
    map_outputs(metric);
  }

  // W_o^T W_o o_i, |W_o o_i|^2 and, for the new tokens, |W_o v_j|^2.
  void map_outputs(const std::vector<float>* metric) {
    mapped.resize(n * group, v_dim);
    values_tile.resize(n, v_dim);
    widen_rows(block->v, block->cells + block->first, v_width, kv_head * v_dim, values_tile);
    for (int i = 0; i < group; ++i) {
      vmv[size_of(i)].resize(weight.size());
      Eigen::Map<Eigen::VectorXf> fresh(vmv[size_of(i)].data() + block->first, n);
      if (metric == nullptr) {
        mapped.middleRows(i * n, n) = outputs.middleRows(i * n, n);
        fresh = values_tile.rowwise().squaredNorm();
        continue;
      }
      const std::int64_t query_head = std::int64_t{kv_head} * group + i;
      const Eigen::Map<const MatrixF> m(metric->data() + query_head * v_dim * v_dim, v_dim, v_dim);
      mapped.middleRows(i * n, n).noalias() = outputs.middleRows(i * n, n) * m;
      fresh = (values_tile * m).cwiseProduct(values_tile).rowwise().sum();
    }
    output_norm = mapped.cwiseProduct(outputs).rowwise().sum().array();
  }

  void load_logits(std::int64_t begin, std::int64_t end) {
    keys_tile.resize(end - begin, k_dim);
    widen_rows(block->k, block->cells + begin, k_width, kv_head * k_dim, keys_tile);
    logits.noalias() = queries * keys_tile.transpose();
    logits *= block->scale;
    if (block->softcap != 0.0F) logits = block->softcap * (logits.array() / block->softcap).tanh();
    for (Eigen::Index r = 0; r < logits.rows(); ++r) {  // the future is invisible
      const std::int64_t visible = std::clamp<std::int64_t>(block->first + r % n + 1 - begin, 0, end - begin);
      logits.row(r).tail(end - begin - visible).setConstant(-std::numeric_limits<float>::infinity());
    }
  }

  // The softmax's maximum and sum per query.
  void normalise() {
    const Eigen::Index rows = queries.rows();
    max = Eigen::ArrayXf::Constant(rows, -std::numeric_limits<float>::infinity());
    sum = Eigen::ArrayXf::Zero(rows);
    if (block->sinks != nullptr) {
      for (Eigen::Index r = 0; r < rows; ++r) max[r] = block->sinks[kv_head * group + r / n];
      sum.setOnes();
    }
    for (std::int64_t begin = 0; begin < tokens(); begin += kTileKeys) {
      load_logits(begin, std::min<std::int64_t>(tokens(), begin + kTileKeys));
      const Eigen::ArrayXf higher = max.max(logits.rowwise().maxCoeff().array());
      sum *= (max == higher).select(1.0F, (max - higher).exp());
      sum += (logits.array().colwise() - higher).exp().rowwise().sum();
      max = higher;
    }
  }

  // Weights of the pairs that are read as codes, summed by query and by key.
  void weigh(const ImportanceConfig& config) {
    query_weight = Eigen::ArrayXf::Zero(queries.rows());
    const std::int64_t last = tokens() - config.recent;  // one beyond the youngest key that the last query reads as a code
    for (std::int64_t begin = config.sink / kTileKeys * kTileKeys; begin < last; begin += kTileKeys) {
      const std::int64_t end = std::min<std::int64_t>(tokens(), begin + kTileKeys);
      load_logits(begin, end);
      values_tile.resize(end - begin, v_dim);
      widen_rows(block->v, block->cells + begin, v_width, kv_head * v_dim, values_tile);
      cross.noalias() = mapped * values_tile.transpose();
      logits = ((logits.array().colwise() - max).exp().colwise() / sum).square();
      for (Eigen::Index r = 0; r < logits.rows(); ++r) {
        const Eigen::Map<const Eigen::ArrayXf> value_norm(vmv[size_of(r / n)].data() + begin, end - begin);
        auto w = logits.row(r).array();
        w *= (value_norm.transpose() - 2.0F * cross.row(r).array() + output_norm[r]).max(0.0F);
        const std::int64_t from = std::clamp<std::int64_t>(config.sink - begin, 0, end - begin);
        const std::int64_t to = std::clamp<std::int64_t>(block->first + r % n - config.recent + 1 - begin, from, end - begin);
        w.head(from).setZero();
        w.tail(end - begin - to).setZero();
        query_weight[r] += w.sum();
      }
      const Eigen::VectorXd columns = logits.cast<double>().colwise().sum();
      for (Eigen::Index j = 0; j < columns.size(); ++j) weight[size_of(begin + j)] += columns[j];
    }
  }

  void add_metric(HeadImportance& head, bool has_rope) {
    const float total = query_weight.sum();
    if (!(total > 0.0F)) return;
    head.pair_weight += static_cast<double>(total);
    const auto add = [&](const MatrixF& q, float share) {
      const MatrixF weighted = (query_weight * share).sqrt().matrix().asDiagonal() * q;
      head.metric += (weighted.transpose() * weighted).cast<double>();
    };
    add(queries, has_rope ? 0.5F : 1.0F);
    MatrixF turned(queries.rows(), k_dim);
    for (int copy = 0; has_rope && copy < 2; ++copy) {
      for (Eigen::Index r = 0; r < queries.rows(); ++r) {
        turns.turn(offset_index(block->first + r % n, copy), queries.row(r), turned.row(r).data());
      }
      add(turned, 0.25F);
    }
  }

  // t_j of the keys begin .. end - 1.
  [[nodiscard]] std::vector<float> token_weights(std::int64_t begin, std::int64_t end) const {
    double mean = 0;
    for (std::int64_t j = begin; j < end; ++j) mean += weight[size_of(j)] / static_cast<double>(end - begin);
    std::vector<float> t;
    for (std::int64_t j = begin; j < end; ++j) {
      t.push_back(mean > 0 ? static_cast<float>(0.5 * weight[size_of(j)] / mean + 0.5) : 1.0F);
    }
    return t;
  }

  void add_joint(HeadImportance& head, const Rope& rope, std::int64_t begin, const std::vector<float>& token_weight) {
    constexpr Eigen::Index kRows = 128;
    const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
    const int copies = pairs > 0 ? 2 : 1;
    MatrixD a(kRows, head.joint.rows());
    MatrixF key(1, head.metric.rows());
    MatrixF turned = key;
    const auto end = begin + static_cast<std::int64_t>(token_weight.size());
    for (std::int64_t first = begin; first < end; first += kRows) {
      const Eigen::Index count = std::min<std::int64_t>(kRows, end - first);
      for (int copy = 0; copy < copies; ++copy) {
        for (Eigen::Index r = 0; r < count; ++r) {
          const std::int64_t position = first + r;
          const std::uint16_t* row = keys.data() + position * key.cols();
          for (Eigen::Index d = 0; d < key.cols(); ++d) key(0, d) = half_to_float(row[d]);
          if (copy == 1) turns.turn(offset_index(position, 0), key.row(0), turned.data());
          const std::int64_t shown = copy == 1 ? position + position_mix_offset(position, 0) : position;
          a.row(r).head(key.cols()) = (copy == 1 ? turned : key).row(0).cast<double>();
          for (Eigen::Index pair = 0; pair < pairs; ++pair) {
            const double angle = static_cast<double>(shown) * rope.theta()[size_of(pair)];
            a(r, key.cols() + pair) = rope.magnitude() * std::cos(angle);
            a(r, key.cols() + pairs + pair) = rope.magnitude() * std::sin(angle);
          }
          a(r, key.cols() + 2 * pairs) = 1.0;
          a.row(r) *= std::sqrt(static_cast<double>(token_weight[size_of(position - begin)]) / copies);
        }
        head.joint.selfadjointView<Eigen::Lower>().rankUpdate(a.topRows(count).transpose());
      }
    }
    head.joint.triangularView<Eigen::StrictlyUpper>() = head.joint.transpose();
    head.tokens += end - begin;
  }

  void clear() {
    keys.clear();
    weight.clear();
    for (auto& of_head : vmv) of_head.clear();
  }

 private:
  const Block* block = nullptr;
  int group = 1, kv_head = 0;
  Eigen::Index n = 0, k_dim = 0, v_dim = 0;
  std::int64_t k_width = 0, v_width = 0;
  MatrixF queries, outputs, mapped, keys_tile, values_tile, logits, cross;
  Eigen::ArrayXf max, sum, output_norm, query_weight;
};

ImportanceCollector::ImportanceCollector(LayerShape shape, ImportanceConfig config,
                                         std::shared_ptr<const std::vector<float>> output_metric)
    : shape_(std::move(shape)), config_(config), rope_(shape_.rope, shape_.k_dim), output_metric_(std::move(output_metric)) {
  if (config_.sink < 0 || config_.recent < 0) fail("importance: windows of {} and {} tokens", config_.sink, config_.recent);
  if (config_.max_samples < 2 || config_.max_samples % 2 != 0) {  // halves of an odd number would not lie on one stride
    fail("importance: max_samples is {}; it must be even and at least 2", config_.max_samples);
  }
  const auto metric_size = size_of(std::int64_t{shape_.n_head} * shape_.v_dim * shape_.v_dim);
  if (output_metric_ && output_metric_->size() != metric_size) {
    fail("layer {}: the output metric has {} values; n_head * v_dim^2 = {} are needed", shape_.layer, output_metric_->size(),
         metric_size);
  }
  const Eigen::Index joint = shape_.k_dim + 2 * static_cast<Eigen::Index>(rope_.theta().size()) + 1;
  for (int h = 0; h < shape_.n_head_kv; ++h) {
    HeadImportance& head = heads_.emplace_back();
    head.metric = MatrixD::Zero(shape_.k_dim, shape_.k_dim);
    head.joint = MatrixD::Zero(joint, joint);
    running_.push_back(std::make_unique<Sequence>(rope_, shape_.n_head / shape_.n_head_kv));
  }
}

ImportanceCollector::~ImportanceCollector() = default;

std::int32_t position_mix_offset(std::int64_t position, int copy) { return offset_index(position, copy) * kOffsetStep; }

void ImportanceCollector::add(const Block& block, int head_begin, int head_end) {
  for (int h = head_begin; h < head_end; ++h) {
    Sequence& sequence = *running_[size_of(h)];
    if (sequence.tokens() != block.first) {
      fail("layer {}: importance was given position {} after {} positions", shape_.layer, block.first, sequence.tokens());
    }
    sequence.load(block, shape_, h, output_metric_.get());
    if (block.first + block.n - config_.sink <= config_.recent) continue;  // nothing is coded yet
    sequence.normalise();
    sequence.weigh(config_);
    sequence.add_metric(heads_[size_of(h)], !rope_.theta().empty());
  }
}

void ImportanceCollector::end_sequence() {
  const std::int64_t begin = config_.sink;
  const std::int64_t end = running_.front()->tokens() - config_.recent;  // keys that some query reads as codes
  std::vector<std::vector<float>> weights;
  for (std::size_t h = 0; h < running_.size() && begin < end; ++h) {
    weights.push_back(running_[h]->token_weights(begin, end));
    running_[h]->add_joint(heads_[h], rope_, begin, weights.back());
  }
  for (std::int64_t j = begin; j < end; ++j, ++seen_) {
    if (seen_ % stride_ == 0 && static_cast<std::int64_t>(heads_.front().sample_positions.size()) == config_.max_samples) {
      for (HeadImportance& head : heads_) thin_samples(head, (config_.max_samples + 1) / 2);
      stride_ *= 2;
    }
    if (seen_ % stride_ != 0) continue;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      const auto row = running_[h]->keys.begin() + j * shape_.k_dim;
      heads_[h].sample_keys.insert(heads_[h].sample_keys.end(), row, row + shape_.k_dim);
      heads_[h].sample_weights.push_back(weights[h][size_of(j - begin)]);
      heads_[h].sample_positions.push_back(static_cast<std::int32_t>(j));
    }
  }
  for (auto& sequence : running_) sequence->clear();
}

KeyCovariance covariance(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean) {
  const Eigen::Index dim = head.metric.rows();
  const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
  const Eigen::Index one = dim + 2 * pairs;
  // x = a L: the key minus the turned mean, which is linear in the sines.
  MatrixD l = MatrixD::Zero(head.joint.rows(), dim);
  l.topRows(dim).setIdentity();
  std::vector<bool> turns(size_of(dim), false);
  for (Eigen::Index pair = 0; pair < pairs; ++pair) {
    const auto first = static_cast<Eigen::Index>(rope.first_of(size_of(pair)));
    const auto second = static_cast<Eigen::Index>(rope.second_of(size_of(pair)));
    l(dim + pair, first) = -pre_rope_mean[first];
    l(dim + pairs + pair, first) = pre_rope_mean[second];
    l(dim + pair, second) = -pre_rope_mean[second];
    l(dim + pairs + pair, second) = -pre_rope_mean[first];
    turns[size_of(first)] = turns[size_of(second)] = true;
  }
  for (Eigen::Index d = 0; d < dim; ++d) {
    if (!turns[size_of(d)]) l(one, d) = -pre_rope_mean[d];
  }
  const double weight = head.joint(one, one);
  KeyCovariance result{VectorD::Zero(dim), MatrixD::Zero(dim, dim)};
  if (!(weight > 0)) return result;
  const MatrixD second_moment = l.transpose() * head.joint * l / weight;
  result.mean = head.joint.row(one) * l / weight;
  result.covariance = second_moment - result.mean.transpose() * result.mean;
  return result;
}

void merge(HeadImportance& a, const HeadImportance& b) {
  if (a.metric.rows() != b.metric.rows() || a.joint.rows() != b.joint.rows())
    fail("importance of different layers cannot be merged");
  const auto have_a = static_cast<double>(a.sample_positions.size());
  const auto have_b = static_cast<double>(b.sample_positions.size());
  const auto tokens_a = static_cast<double>(a.tokens);
  const auto tokens_b = static_cast<double>(b.tokens);
  HeadImportance more = b;
  if (tokens_a > 0 && tokens_b > 0) {
    const double density = std::min({have_a / tokens_a, have_b / tokens_b, std::max(have_a, have_b) / (tokens_a + tokens_b)});
    thin_samples(a, static_cast<std::int64_t>(std::round(density * tokens_a)));
    thin_samples(more, static_cast<std::int64_t>(std::round(density * tokens_b)));
  }
  a.metric += b.metric;
  a.joint += b.joint;
  a.pair_weight += b.pair_weight;
  a.tokens += b.tokens;
  a.sample_keys.insert(a.sample_keys.end(), more.sample_keys.begin(), more.sample_keys.end());
  a.sample_weights.insert(a.sample_weights.end(), more.sample_weights.begin(), more.sample_weights.end());
  a.sample_positions.insert(a.sample_positions.end(), more.sample_positions.begin(), more.sample_positions.end());
}

}  // namespace oscar

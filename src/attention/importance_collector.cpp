#include "oscar/attention/importance_collector.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"

namespace oscar {
namespace {

using namespace attention;

constexpr float kInvisible = -std::numeric_limits<float>::infinity();

// A bias row whose first n entries are visible starts at entry kTile - n.
constexpr std::array<float, 2 * kTile> kFuture = [] {
  std::array<float, 2 * kTile> bias{};
  for (std::size_t j = kTile; j < bias.size(); ++j) bias[j] = kInvisible;
  return bias;
}();

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

// What the rows of `joint` hold beside the key, the same for all heads: [count, n_rot + 1] for positions first ...
MatrixD joint_waves(const Rope& rope, std::int64_t first, std::int64_t count, int copy) {
  const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
  MatrixD waves(count, 2 * pairs + 1);
  for (Eigen::Index r = 0; r < count; ++r) {
    const std::int64_t shown = first + r + (copy == 1 ? position_mix_offset(first + r, 0) : 0);
    for (Eigen::Index pair = 0; pair < pairs; ++pair) {
      const double angle = static_cast<double>(shown) * rope.theta()[size_of(pair)];
      waves(r, pair) = rope.magnitude() * std::cos(angle);
      waves(r, pairs + pair) = rope.magnitude() * std::sin(angle);
    }
    waves(r, 2 * pairs) = 1.0;
  }
  return waves;
}

// What one thread needs for one block; its size depends on the block and the sequence, not on the layer or head.
struct Workspace {
  struct Rows {                                // of one query head; rows are the block's tokens, padded to kLane or kPanel
    MatrixF scaled, outputs, mapped;           // q with the softmax scale [n, D]; o [n, Dv]; W_o^T W_o o [n, Dv]
    FloatBuffer exponentials;                  // [tiles][n][kTile] exp(logit - tile_max)
    std::vector<float> tile_max;               // [tiles][n] the largest logit up to this tile
    std::vector<float> max, sum;               // [n]
    Eigen::ArrayXf output_norm, query_weight;  // [n] |W_o o|^2, w_i.
  };
  std::vector<Rows> rows;
  FloatBuffer tile, panels, cross;
  MatrixF values, mapped_values, stacked, across, product;
};

Workspace& workspace() {
  thread_local Workspace w;
  return w;
}

// sum_j p_j^2 |W_o (v_j - o)|^2 over a tile, added to `column` per key. p: exponentials, made probabilities by `factor`.
float add_pairs(const float* p, float factor, const float* value_norm, const float* cross, float output_norm, float* column) {
  constexpr int kSums = 8;  // side by side, so that the loop can be vectorised and the order is fixed
  std::array<float, kSums> sums{};
  for (int j = 0; j < kTile; j += kSums) {
    for (int l = 0; l < kSums; ++l) {
      const float probability = p[j + l] * factor;
      const float square = std::max(0.0F, value_norm[j + l] - 2.0F * cross[j + l] + output_norm);
      const float pair = probability * probability * square;
      column[j + l] += pair;
      sums[static_cast<std::size_t>(l)] += pair;
    }
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

}  // namespace

// Turns rows on by the offsets of the position mix, from a table of sines.
class ImportanceCollector::OffsetTurns {
 public:
  explicit OffsetTurns(const Rope& rope) : rope_(rope) {
    const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
    cosine_.resize(kMixOffsets, pairs);
    sine_.resize(kMixOffsets, pairs);
    for (int i = 0; i < kMixOffsets; ++i) {
      for (Eigen::Index pair = 0; pair < pairs; ++pair) {
        const double angle = static_cast<double>(i) * kMixOffsetStep * rope.theta()[size_of(pair)];
        cosine_(i, pair) = static_cast<float>(std::cos(angle));
        sine_(i, pair) = static_cast<float>(std::sin(angle));
      }
    }
  }
  // in, out: [dim].
  void turn(int index, const float* in, int dim, float* out) const {
    std::copy_n(in, dim, out);
    for (std::size_t pair = 0; pair < rope_.theta().size(); ++pair) {
      const std::size_t first = rope_.first_of(pair);
      const std::size_t second = rope_.second_of(pair);
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

// One query head's part of the running sequence.
struct ImportanceCollector::QueryHead {
  std::int64_t tokens = 0;
  std::vector<double> weight;     // [tokens] its share of w_.j
  std::vector<float> value_norm;  // [tokens, padded to whole tiles] |W_o v_j|^2
  MatrixD metric;                 // its share of HeadImportance::metric
  double pair_weight = 0, output_energy = 0;
};

// Adds a block to consecutive query heads of one KV head: they share its cache rows.
class ImportanceCollector::BlockPass {
 public:
  BlockPass(const ImportanceCollector& collector, const Block& block, int kv_head, std::span<QueryHead> heads, int first_head)
      : shape_(collector.shape_),
        config_(collector.config_),
        metric_(collector.output_metric_.get()),
        turns_(*collector.turns_),
        has_rope_(!collector.rope_.theta().empty()),
        block_(block),
        heads_(heads),
        kv_head_(kv_head),
        first_head_(first_head),
        n_(static_cast<int>(block.n)),
        tokens_(block.first + block.n),
        k_ld_(round_up(shape_.k_dim, kLane)),
        v_ld_(round_up(shape_.v_dim, kPanel)) {}

  void run() {
    if (w_.rows.size() < heads_.size()) w_.rows.resize(heads_.size());
    load();
    if (tokens_ - config_.sink <= config_.recent) return;  // nothing is coded yet
    attend();
    weigh();
    for (std::size_t i = 0; i < heads_.size(); ++i) add_metric(w_.rows[i], heads_[i]);
  }

 private:
  using Rows = Workspace::Rows;

  void load() {
    w_.values = MatrixF::Zero(n_, v_ld_);
    for (int t = 0; t < n_; ++t) {
      const std::int64_t width = std::int64_t{shape_.n_head_kv} * shape_.v_dim;
      const std::uint16_t* row = block_.v + block_.cells[block_.first + t] * width + std::int64_t{kv_head_} * shape_.v_dim;
      kernels_.widen(row, shape_.v_dim, w_.values.row(t).data());
    }
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      Rows& rows = w_.rows[i];
      const std::int64_t head = first_head_ + static_cast<std::int64_t>(i);
      rows.scaled = MatrixF::Zero(n_, k_ld_);
      rows.outputs = MatrixF::Zero(n_, v_ld_);
      for (int t = 0; t < n_; ++t) {
        std::copy_n(block_.q + t * block_.q_token + head * block_.q_head, shape_.k_dim, rows.scaled.row(t).data());
        std::copy_n(block_.o + t * block_.o_token + head * block_.o_head, shape_.v_dim, rows.outputs.row(t).data());
      }
      rows.scaled *= block_.scale;
      map_rows(head, rows.outputs, rows.mapped);
      map_rows(head, w_.values, w_.mapped_values);
      rows.output_norm = rows.mapped.cwiseProduct(rows.outputs).rowwise().sum().array();
      QueryHead& of = heads_[i];
      of.tokens = tokens_;
      of.weight.resize(size_of(tokens_), 0.0);
      of.value_norm.resize(size_of((tokens_ + kTile - 1) / kTile * kTile), 0.0F);  // tiles are read whole
      Eigen::Map<Eigen::VectorXf>(of.value_norm.data() + block_.first, n_) =
          w_.mapped_values.cwiseProduct(w_.values).rowwise().sum();
    }
  }

  // out = rows times W_o^T W_o of a query head, [n, v_ld].
  void map_rows(std::int64_t head, const MatrixF& rows, MatrixF& out) {
    if (metric_ == nullptr) {
      out = rows;
      return;
    }
    const int dim = shape_.v_dim;
    const float* matrix = metric_->data() + head * dim * dim;
    out = MatrixF::Zero(rows.rows(), v_ld_);
    if (dim % kPanel == 0) {
      kernels_.multiply(rows.data(), v_ld_, n_, dim, matrix, dim, dim, out.data(), v_ld_, false);
    } else {
      out.leftCols(dim).noalias() = rows.leftCols(dim) * Eigen::Map<const MatrixF>(matrix, dim, dim);
    }
  }

  // Exponentials of all logits, and the softmax's maximum and sum per query.
  void attend() {
    const std::int64_t tiles = (tokens_ + kTile - 1) / kTile;
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      Rows& rows = w_.rows[i];
      rows.max.assign(size_of(n_), kInvisible);
      rows.sum.assign(size_of(n_), 0.0F);
      rows.tile_max.assign(size_of(tiles * n_), kInvisible);
      rows.exponentials.reserve(size_of(tiles * n_ * kTile));
      if (block_.sinks == nullptr) continue;
      std::fill(rows.max.begin(), rows.max.end(), block_.sinks[first_head_ + static_cast<int>(i)]);
      std::fill(rows.sum.begin(), rows.sum.end(), 1.0F);
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t begin = tile * kTile;
      load_tile(block_.k, begin, shape_.k_dim, k_ld_);
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        Rows& rows = w_.rows[i];
        float* out = rows.exponentials.data() + tile * n_ * kTile;
        multiply_tile(rows.scaled, k_ld_, out);
        for (int t = 0; t < n_; ++t) {
          float* row = out + std::ptrdiff_t{t} * kTile;
          const auto visible = std::clamp<std::int64_t>(block_.first + t + 1 - begin, 0, kTile);
          const float* bias = visible == kTile ? nullptr : kFuture.data() + kTile - visible;
          const float highest = kernels_.logits(row, bias, 1.0F, block_.softcap);
          float& max = rows.max[size_of(t)];
          const float higher = std::max(max, highest);
          rows.tile_max[size_of(tile * n_ + t)] = higher;
          if (highest == kInvisible) {
            std::fill_n(row, kTile, 0.0F);
            continue;
          }
          if (higher > max) rows.sum[size_of(t)] *= std::exp(max - higher);
          max = higher;
          rows.sum[size_of(t)] += kernels_.exponentials(row, higher);
        }
      }
    }
  }

  // Weights of the pairs that are read as codes, summed by query and by key.
  void weigh() {
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      Rows& rows = w_.rows[i];
      rows.query_weight = Eigen::ArrayXf::Zero(n_);
      for (int t = 0; t < n_; ++t) {
        if (block_.first + t >= std::int64_t{config_.sink} + config_.recent)
          heads_[i].output_energy += static_cast<double>(rows.output_norm[t]);
      }
    }
    const std::int64_t last = tokens_ - config_.recent;  // one beyond the youngest key that the last query reads as a code
    w_.cross.reserve(size_of(std::int64_t{n_} * kTile));
    for (std::int64_t begin = config_.sink / kTile * kTile; begin < last; begin += kTile) {
      load_tile(block_.v, begin, shape_.v_dim, v_ld_);
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        Rows& rows = w_.rows[i];
        multiply_tile(rows.mapped, v_ld_, w_.cross.data());
        std::array<float, kTile> column{};
        for (int t = 0; t < n_; ++t) {
          const auto from = std::clamp<std::int64_t>(config_.sink - begin, 0, kTile);
          const auto to = std::clamp<std::int64_t>(block_.first + t - config_.recent + 1 - begin, from, kTile);
          if (from == to) continue;
          float* p = rows.exponentials.data() + (begin / kTile * n_ + t) * kTile;
          std::fill_n(p, from, 0.0F);
          std::fill(p + to, p + kTile, 0.0F);
          const float factor =
              std::exp(rows.tile_max[size_of(begin / kTile * n_ + t)] - rows.max[size_of(t)]) / rows.sum[size_of(t)];
          rows.query_weight[t] += add_pairs(p, factor, heads_[i].value_norm.data() + begin,
                                            w_.cross.data() + std::ptrdiff_t{t} * kTile, rows.output_norm[t], column.data());
        }
        const auto end = std::min<std::int64_t>(kTile, tokens_ - begin);
        for (std::int64_t j = 0; j < end; ++j) heads_[i].weight[size_of(begin + j)] += static_cast<double>(column[size_of(j)]);
      }
    }
  }

  void add_metric(const Rows& rows, QueryHead& head) {
    const float total = rows.query_weight.sum();
    if (!(total > 0.0F)) return;
    head.pair_weight += static_cast<double>(total);
    const int dim = shape_.k_dim;
    const int copies = has_rope_ ? 3 : 1;  // as it is, and turned on twice
    const int ld = round_up(dim, kPanel);
    w_.stacked = MatrixF::Zero(std::int64_t{copies} * n_, ld);
    for (int t = 0; t < n_; ++t) {
      const float* q = rows.scaled.row(t).data();
      for (int copy = 0; copy < copies; ++copy) {
        auto row = w_.stacked.row(std::ptrdiff_t{copy} * n_ + t);
        if (copy == 0) {
          std::copy_n(q, dim, row.data());
        } else {
          turns_.turn(position_mix_index(block_.first + t, copy - 1), q, dim, row.data());
        }
        row *= std::sqrt(rows.query_weight[t] * (!has_rope_ ? 1.0F : copy == 0 ? 0.5F : 0.25F));
      }
    }
    w_.across = w_.stacked.leftCols(dim).transpose();
    w_.product.resize(dim, ld);
    kernels_.multiply(w_.across.data(), w_.across.cols(), dim, static_cast<int>(w_.stacked.rows()), w_.stacked.data(), ld, ld,
                      w_.product.data(), ld, false);
    head.metric += w_.product.leftCols(dim).cast<double>();
  }

  // Cache rows of the positions begin .. begin + kTile - 1, as panels; rows beyond the sequence are 0.
  void load_tile(const std::uint16_t* cache, std::int64_t begin, int dim, int ld) {
    const std::int64_t width = std::int64_t{shape_.n_head_kv} * dim;
    w_.tile.reserve(size_of(std::int64_t{kTile} * ld));
    w_.panels.reserve(size_of(std::int64_t{kTile} * ld));
    for (int j = 0; j < kTile; ++j) {
      float* out = w_.tile.data() + std::ptrdiff_t{j} * ld;
      std::fill_n(out, ld, 0.0F);
      if (begin + j >= tokens_) continue;
      kernels_.widen(cache + block_.cells[begin + j] * width + std::int64_t{kv_head_} * dim, dim, out);
    }
    kernels_.transpose(w_.tile.data(), ld, ld, w_.panels.data());
  }

  // out [n, kTile] = a [n, ld] times the tile's rows.
  void multiply_tile(const MatrixF& a, int ld, float* out) {
    for (int p = 0; p < kTile; p += kPanel)
      kernels_.multiply(a.data(), ld, n_, ld, w_.panels.data() + std::ptrdiff_t{p} * ld, kPanel, kPanel, out + p, kTile, false);
  }

  const LayerShape& shape_;
  const ImportanceConfig& config_;
  const std::vector<float>* metric_;
  const OffsetTurns& turns_;
  bool has_rope_;
  const Block& block_;
  std::span<QueryHead> heads_;
  int kv_head_, first_head_, n_;
  std::int64_t tokens_;
  int k_ld_, v_ld_;
  const Kernels& kernels_ = active_kernels();
  Workspace& w_ = workspace();
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
  turns_ = std::make_unique<const OffsetTurns>(rope_);
  keys_.resize(size_of(shape_.n_head_kv));
  for (int h = 0; h < shape_.n_head_kv; ++h) {
    HeadImportance& head = heads_.emplace_back();
    head.metric = MatrixD::Zero(shape_.k_dim, shape_.k_dim);
    head.joint = MatrixD::Zero(joint, joint);
  }
  running_.resize(size_of(shape_.n_head));
  for (QueryHead& head : running_) head.metric = MatrixD::Zero(shape_.k_dim, shape_.k_dim);
}

ImportanceCollector::~ImportanceCollector() = default;

void ImportanceCollector::add(const Block& block, int head_begin, int head_end) {
  const int group = shape_.n_head / shape_.n_head_kv;
  for (int begin = head_begin; begin < head_end;) {
    const int kv_head = begin / group;
    const int end = std::min(head_end, (kv_head + 1) * group);
    const std::span heads = std::span(running_).subspan(size_of(begin), size_of(end - begin));
    for (const QueryHead& head : heads) {
      if (head.tokens != block.first)
        fail("layer {}: importance was given position {} after {} positions", shape_.layer, block.first, head.tokens);
    }
    if (begin % group == 0) keep_keys(block, kv_head);
    BlockPass(*this, block, kv_head, heads, begin).run();
    begin = end;
  }
}

void ImportanceCollector::keep_keys(const Block& block, int kv_head) {
  std::vector<std::uint16_t>& keys = keys_[size_of(kv_head)];
  const std::int64_t width = std::int64_t{shape_.n_head_kv} * shape_.k_dim;
  for (std::int64_t t = block.first; t < block.first + block.n; ++t) {
    const std::uint16_t* row = block.k + block.cells[t] * width + std::int64_t{kv_head} * shape_.k_dim;
    keys.insert(keys.end(), row, row + shape_.k_dim);
  }
}

// Adds the sums of the sequence's query heads to their KV head, in order; returns t_j of the keys begin .. end - 1.
std::vector<float> ImportanceCollector::gather(int kv_head, std::int64_t begin, std::int64_t end) {
  const int group = shape_.n_head / shape_.n_head_kv;
  HeadImportance& head = heads_[size_of(kv_head)];
  std::vector<double> weight(size_of(std::max<std::int64_t>(0, end - begin)), 0.0);
  for (QueryHead& part : std::span(running_).subspan(size_of(std::int64_t{kv_head} * group), size_of(group))) {
    head.metric += part.metric;
    head.pair_weight += part.pair_weight;
    head.output_energy += part.output_energy;
    for (std::size_t j = 0; j < weight.size(); ++j) weight[j] += part.weight[size_of(begin) + j];
    part.metric.setZero();
    part.pair_weight = part.output_energy = 0;
    part.tokens = 0;
    part.weight.clear();
    part.value_norm.clear();
  }
  double mean = 0;
  for (const double w : weight) mean += w / static_cast<double>(weight.size());
  std::vector<float> t;
  t.reserve(weight.size());
  for (const double w : weight) t.push_back(mean > 0 ? static_cast<float>(0.5 * w / mean + 0.5) : 1.0F);
  return t;
}

// Adds the keys at the rows of `waves` (see joint_waves()), turned on in copy 1.
void ImportanceCollector::add_joint(int kv_head, std::int64_t first, int copy, const MatrixD& waves,
                                    std::span<const float> token_weight, double share) {
  const Kernels& kernels = active_kernels();
  const std::vector<std::uint16_t>& keys = keys_[size_of(kv_head)];
  MatrixD& joint = heads_[size_of(kv_head)].joint;
  const auto count = static_cast<Eigen::Index>(token_weight.size());
  const int dim = shape_.k_dim;
  MatrixD a(count, joint.rows());
  VectorF key(dim);
  VectorF turned(dim);
  for (Eigen::Index r = 0; r < count; ++r) {
    const std::int64_t position = first + r;
    kernels.widen(keys.data() + position * dim, dim, key.data());
    if (copy == 1) turns_->turn(position_mix_index(position, 0), key.data(), dim, turned.data());
    a.row(r).head(dim) = (copy == 1 ? turned : key).cast<double>();
    a.row(r).tail(waves.cols()) = waves.row(r);
    a.row(r) *= std::sqrt(static_cast<double>(token_weight[size_of(r)]) * share);
  }
  joint.selfadjointView<Eigen::Lower>().rankUpdate(a.transpose());
}

void ImportanceCollector::end_sequence() {
  const std::int64_t begin = config_.sink;
  const std::int64_t end = running_.front().tokens - config_.recent;  // keys that some query reads as codes
  std::vector<std::vector<float>> weights;
  weights.reserve(static_cast<std::size_t>(shape_.n_head_kv));
  for (int h = 0; h < shape_.n_head_kv; ++h) weights.push_back(gather(h, begin, end));
  constexpr std::int64_t kRows = 128;
  const int copies = rope_.theta().empty() ? 1 : 2;
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t count = std::min(kRows, end - first);
    for (int copy = 0; copy < copies; ++copy) {
      const MatrixD waves = joint_waves(rope_, first, count, copy);
      for (int h = 0; h < shape_.n_head_kv; ++h) {
        const std::span part = std::span(weights[size_of(h)]).subspan(size_of(first - begin), size_of(count));
        add_joint(h, first, copy, waves, part, 1.0 / copies);
      }
    }
  }
  for (HeadImportance& head : heads_) {
    if (begin >= end) break;
    head.joint.triangularView<Eigen::StrictlyUpper>() = head.joint.transpose();
    head.tokens += end - begin;
  }
  for (std::int64_t j = begin; j < end; ++j, ++seen_) {
    if (seen_ % stride_ == 0 && static_cast<std::int64_t>(heads_.front().sample_positions.size()) == config_.max_samples) {
      for (HeadImportance& head : heads_) thin_samples(head, config_.max_samples / 2);
      stride_ *= 2;
    }
    if (seen_ % stride_ != 0) continue;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      const auto row = keys_[h].begin() + j * shape_.k_dim;
      heads_[h].sample_keys.insert(heads_[h].sample_keys.end(), row, row + shape_.k_dim);
      heads_[h].sample_weights.push_back(weights[h][size_of(j - begin)]);
      heads_[h].sample_positions.push_back(static_cast<std::int32_t>(j));
    }
  }
  for (auto& keys : keys_) keys.clear();
}

}  // namespace oscar

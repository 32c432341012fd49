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

// Turns rows on by the offsets of the position mix, from a table of sines.
class OffsetTurns {
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

}  // namespace

// One KV head's part of the running sequence, and the scratch of a block. Rows of scratch matrices are padded to kLane.
struct ImportanceCollector::Sequence {
  std::vector<std::uint16_t> keys;      // [tokens, D]
  std::vector<double> weight;           // [tokens] w_.j
  std::vector<std::vector<float>> vmv;  // [group][tokens] |W_o v_j|^2

  Sequence(const LayerShape& shape, std::shared_ptr<const OffsetTurns> turns, int head)
      : vmv(size_of(shape.n_head / shape.n_head_kv)),
        turns_(std::move(turns)),
        kernels_(active_kernels()),
        group_(shape.n_head / shape.n_head_kv),
        kv_head_(head),
        k_dim_(shape.k_dim),
        v_dim_(shape.v_dim),
        k_ld_(round_up(shape.k_dim, kLane)),
        v_ld_(round_up(shape.v_dim, kLane)),
        k_width_(std::int64_t{shape.n_head_kv} * shape.k_dim),
        v_width_(std::int64_t{shape.n_head_kv} * shape.v_dim) {}

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(weight.size()); }

  // Takes the block's rows in. Query head i's tokens become rows i * n .. i * n + n - 1.
  void load(const Block& b, const std::vector<float>* metric) {
    block_ = &b;
    n_ = static_cast<int>(b.n);
    rows_ = n_ * group_;
    for (std::int64_t t = b.first; t < b.first + n_; ++t) {
      const std::uint16_t* row = b.k + b.cells[t] * k_width_ + std::int64_t{kv_head_} * k_dim_;
      keys.insert(keys.end(), row, row + k_dim_);
    }
    weight.resize(size_of(b.first + n_), 0.0);
    scaled_ = MatrixF::Zero(rows_, k_ld_);
    outputs_.resize(rows_, v_dim_);
    for (int i = 0; i < group_; ++i) {
      const std::int64_t query_head = std::int64_t{kv_head_} * group_ + i;
      for (std::int64_t t = 0; t < n_; ++t) {
        std::copy_n(b.q + t * b.q_token + query_head * b.q_head, k_dim_, scaled_.row(i * n_ + t).data());
        std::copy_n(b.o + t * b.o_token + query_head * b.o_head, v_dim_, outputs_.row(i * n_ + t).data());
      }
    }
    scaled_ *= b.scale;
    map_outputs(metric);
  }

  // The softmax's maximum and sum per query.
  void normalise() {
    max_.assign(size_of(rows_), kInvisible);
    sum_.assign(size_of(rows_), 0.0F);
    if (block_->sinks != nullptr) {
      for (int r = 0; r < rows_; ++r) max_[size_of(r)] = block_->sinks[kv_head_ * group_ + r / n_];
      std::fill(sum_.begin(), sum_.end(), 1.0F);
    }
    for (std::int64_t begin = 0; begin < tokens(); begin += kTile) {
      load_logits(begin);
      for (int r = 0; r < rows_; ++r) {
        if (tile_max_[size_of(r)] == kInvisible) continue;
        float& max = max_[size_of(r)];
        const float higher = std::max(max, tile_max_[size_of(r)]);
        if (higher > max) sum_[size_of(r)] *= std::exp(max - higher);
        max = higher;
        sum_[size_of(r)] += kernels_.exponentials(logits_.data() + std::ptrdiff_t{r} * kTile, higher);
      }
    }
  }

  // Weights of the pairs that are read as codes, summed by query and by key.
  void weigh(const ImportanceConfig& config) {
    query_weight_ = Eigen::ArrayXf::Zero(rows_);
    output_energy_ = 0;
    for (int r = 0; r < rows_; ++r) {
      if (block_->first + r % n_ >= config.sink + config.recent) output_energy_ += static_cast<double>(output_norm_[r]);
    }
    const std::int64_t last = tokens() - config.recent;  // one beyond the youngest key that the last query reads as a code
    for (std::int64_t begin = config.sink / kTile * kTile; begin < last; begin += kTile) {
      load_logits(begin);
      load_tile(block_->v, begin, v_width_, v_dim_, v_ld_);
      multiply_tile(mapped_, v_ld_, cross_);
      std::array<float, kTile> column{};
      for (int r = 0; r < rows_; ++r) {
        const auto from = std::clamp<std::int64_t>(config.sink - begin, 0, kTile);
        const auto to = std::clamp<std::int64_t>(block_->first + r % n_ - config.recent + 1 - begin, from, kTile);
        if (from == to) continue;
        float* w = logits_.data() + std::ptrdiff_t{r} * kTile;
        const float* cross = cross_.data() + std::ptrdiff_t{r} * kTile;
        const float* value_norm = vmv[size_of(r / n_)].data() + begin;
        kernels_.exponentials(w, max_[size_of(r)]);
        const float factor = 1.0F / sum_[size_of(r)];
        const float output_norm = output_norm_[r];
        float total = 0.0F;
        for (auto j = from; j < to; ++j) {
          const float p = w[j] * factor;
          const float pair = p * p * std::max(0.0F, value_norm[j] - 2.0F * cross[j] + output_norm);
          total += pair;
          column[size_of(j)] += pair;
        }
        query_weight_[r] += total;
      }
      const auto end = std::min<std::int64_t>(kTile, tokens() - begin);
      for (std::int64_t j = 0; j < end; ++j) weight[size_of(begin + j)] += static_cast<double>(column[size_of(j)]);
    }
  }

  void add_metric(HeadImportance& head, bool has_rope) {
    head.output_energy += output_energy_;
    const float total = query_weight_.sum();
    if (!(total > 0.0F)) return;
    head.pair_weight += static_cast<double>(total);
    const auto add = [&](const auto& q, float share) {
      const MatrixF weighted = (query_weight_ * share).sqrt().matrix().asDiagonal() * q;
      head.metric += (weighted.transpose() * weighted).template cast<double>();
    };
    add(scaled_.leftCols(k_dim_), has_rope ? 0.5F : 1.0F);
    MatrixF turned(rows_, k_dim_);
    for (int copy = 0; has_rope && copy < 2; ++copy) {
      for (int r = 0; r < rows_; ++r) {
        turns_->turn(position_mix_index(block_->first + r % n_, copy), scaled_.row(r).data(), k_dim_, turned.row(r).data());
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

  // Adds the keys at the rows of `waves` (see joint_waves()), turned on in copy 1.
  void add_joint(HeadImportance& head, std::int64_t first, int copy, const MatrixD& waves, std::span<const float> token_weight,
                 double share) const {
    const auto count = static_cast<Eigen::Index>(token_weight.size());
    MatrixD a(count, head.joint.rows());
    VectorF key(k_dim_);
    VectorF turned(k_dim_);
    for (Eigen::Index r = 0; r < count; ++r) {
      const std::int64_t position = first + r;
      kernels_.widen(keys.data() + position * k_dim_, k_dim_, key.data());
      if (copy == 1) turns_->turn(position_mix_index(position, 0), key.data(), k_dim_, turned.data());
      a.row(r).head(k_dim_) = (copy == 1 ? turned : key).cast<double>();
      a.row(r).tail(waves.cols()) = waves.row(r);
      a.row(r) *= std::sqrt(static_cast<double>(token_weight[size_of(r)]) * share);
    }
    head.joint.selfadjointView<Eigen::Lower>().rankUpdate(a.transpose());
  }

  void clear() {
    keys.clear();
    weight.clear();
    for (auto& of_head : vmv) of_head.clear();
  }

 private:
  // W_o^T W_o o_i, |W_o o_i|^2 and, for the new tokens, |W_o v_j|^2.
  void map_outputs(const std::vector<float>* metric) {
    mapped_ = MatrixF::Zero(rows_, v_ld_);
    MatrixF values(n_, v_dim_);
    for (int t = 0; t < n_; ++t) {
      const std::uint16_t* row = block_->v + block_->cells[block_->first + t] * v_width_ + std::int64_t{kv_head_} * v_dim_;
      kernels_.widen(row, v_dim_, values.row(t).data());
    }
    for (int i = 0; i < group_; ++i) {
      // Padded to whole tiles, which are read whole.
      vmv[size_of(i)].resize(size_of((tokens() + kTile - 1) / kTile * kTile), 0.0F);
      Eigen::Map<Eigen::VectorXf> fresh(vmv[size_of(i)].data() + block_->first, n_);
      auto mapped = mapped_.block(i * n_, 0, n_, v_dim_);
      const auto outputs = outputs_.middleRows(i * n_, n_);
      if (metric == nullptr) {
        mapped = outputs;
        fresh = values.rowwise().squaredNorm();
        continue;
      }
      const std::int64_t query_head = std::int64_t{kv_head_} * group_ + i;
      const Eigen::Map<const MatrixF> m(metric->data() + query_head * v_dim_ * v_dim_, v_dim_, v_dim_);
      mapped.noalias() = outputs * m;
      fresh = (values * m).cwiseProduct(values).rowwise().sum();
    }
    output_norm_ = mapped_.leftCols(v_dim_).cwiseProduct(outputs_).rowwise().sum().array();
  }

  // Cache rows of the positions begin .. begin + kTile - 1, as panels; rows beyond the sequence are 0.
  void load_tile(const std::uint16_t* cache, std::int64_t begin, std::int64_t width, int dim, int ld) {
    tile_.reserve(size_of(std::int64_t{kTile} * ld));
    panels_.reserve(size_of(std::int64_t{kTile} * ld));
    for (int j = 0; j < kTile; ++j) {
      float* out = tile_.data() + std::ptrdiff_t{j} * ld;
      std::fill_n(out, ld, 0.0F);
      if (begin + j >= tokens()) continue;
      kernels_.widen(cache + block_->cells[begin + j] * width + std::int64_t{kv_head_} * dim, dim, out);
    }
    kernels_.transpose(tile_.data(), ld, ld, panels_.data());
  }

  // out [rows, kTile] = a [rows, ld] times the tile's rows.
  void multiply_tile(const MatrixF& a, int ld, FloatBuffer& out) {
    out.reserve(size_of(std::int64_t{rows_} * kTile));
    for (int p = 0; p < kTile; p += kPanel) {
      kernels_.multiply(a.data(), ld, rows_, ld, panels_.data() + std::ptrdiff_t{p} * ld, kPanel, kPanel, out.data() + p, kTile,
                        false);
    }
  }

  void load_logits(std::int64_t begin) {
    load_tile(block_->k, begin, k_width_, k_dim_, k_ld_);
    multiply_tile(scaled_, k_ld_, logits_);
    tile_max_.resize(size_of(rows_));
    for (int r = 0; r < rows_; ++r) {
      float* row = logits_.data() + std::ptrdiff_t{r} * kTile;
      const auto visible = std::clamp<std::int64_t>(block_->first + r % n_ + 1 - begin, 0, kTile);
      const float* bias = visible == kTile ? nullptr : kFuture.data() + kTile - visible;
      tile_max_[size_of(r)] = kernels_.logits(row, bias, 1.0F, 0.0F, block_->softcap);
    }
  }

  std::shared_ptr<const OffsetTurns> turns_;  // of the layer
  const Kernels& kernels_;
  const Block* block_ = nullptr;
  int group_ = 1, kv_head_ = 0, n_ = 0, rows_ = 0;
  int k_dim_ = 0, v_dim_ = 0, k_ld_ = 0, v_ld_ = 0;
  std::int64_t k_width_ = 0, v_width_ = 0;
  MatrixF scaled_, outputs_, mapped_;
  FloatBuffer tile_, panels_, logits_, cross_;
  std::vector<float> max_, sum_, tile_max_;
  Eigen::ArrayXf output_norm_, query_weight_;
  double output_energy_ = 0;
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
  const auto turns = std::make_shared<const OffsetTurns>(rope_);
  for (int h = 0; h < shape_.n_head_kv; ++h) {
    HeadImportance& head = heads_.emplace_back();
    head.metric = MatrixD::Zero(shape_.k_dim, shape_.k_dim);
    head.joint = MatrixD::Zero(joint, joint);
    running_.push_back(std::make_unique<Sequence>(shape_, turns, h));
  }
}

ImportanceCollector::~ImportanceCollector() = default;

void ImportanceCollector::add(const Block& block, int head_begin, int head_end) {
  for (int h = head_begin; h < head_end; ++h) {
    Sequence& sequence = *running_[size_of(h)];
    if (sequence.tokens() != block.first) {
      fail("layer {}: importance was given position {} after {} positions", shape_.layer, block.first, sequence.tokens());
    }
    sequence.load(block, output_metric_.get());
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
  for (std::size_t h = 0; h < running_.size() && begin < end; ++h) weights.push_back(running_[h]->token_weights(begin, end));
  constexpr std::int64_t kRows = 128;
  const int copies = rope_.theta().empty() ? 1 : 2;
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t count = std::min(kRows, end - first);
    for (int copy = 0; copy < copies; ++copy) {
      const MatrixD waves = joint_waves(rope_, first, count, copy);
      for (std::size_t h = 0; h < running_.size(); ++h) {
        const std::span part = std::span(weights[h]).subspan(size_of(first - begin), size_of(count));
        running_[h]->add_joint(heads_[h], first, copy, waves, part, 1.0 / copies);
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
      const auto row = running_[h]->keys.begin() + j * shape_.k_dim;
      heads_[h].sample_keys.insert(heads_[h].sample_keys.end(), row, row + shape_.k_dim);
      heads_[h].sample_weights.push_back(weights[h][size_of(j - begin)]);
      heads_[h].sample_positions.push_back(static_cast<std::int32_t>(j));
    }
  }
  for (auto& sequence : running_) sequence->clear();
}

}  // namespace oscar

// A cache full of random rows and random queries on it.
#pragma once

#include <gtest/gtest.h>

#include <Eigen/QR>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oscar/attention/attention.h"
#include "oscar/base/half.h"
#include "oscar/cache/kv_cache.h"
#include "oscar/codec/int2.h"
#include "oscar/codec/spectral.h"

namespace oscar::test {

enum class Mean { none, fixed, rope };

struct Shape {
  int n_head_kv = 2, group = 3;
  int k_dim = 64, v_dim = 64;
  Mean mean = Mean::rope;
  bool coded = true;
  bool spectral = false;  // its codec, else int2; attended as integers
  Windows windows{8, 40, 16};
  RopePairing pairing = RopePairing::neox;
  int n_rot = 0;  // 0: k_dim
  std::int64_t spare_cells = 7;
};

inline float normal(std::mt19937& rng) { return std::normal_distribution<float>(0.0F, 1.0F)(rng); }

inline MatrixF random_rotation(int dim, std::mt19937& rng) {
  MatrixD gaussian(dim, dim);
  for (Eigen::Index i = 0; i < gaussian.size(); ++i) gaussian.data()[i] = static_cast<double>(normal(rng));
  const MatrixD q = Eigen::HouseholderQR<MatrixD>(gaussian).householderQ() * MatrixD::Identity(dim, dim);
  return q.cast<float>();
}

// Layers 0 and 1 have the same shape and different rows.
class World {
 public:
  World(const Shape& shape, std::int64_t n_cells, unsigned seed = 1) : shape_(shape), rng_(seed) {
    RopeParams params;
    params.pairing = shape.pairing;
    params.n_rot = (shape.n_rot == 0) ? shape.k_dim : shape.n_rot;
    params.attn_factor = 1.1F;
    rope_ = Rope(params, shape.k_dim);
    key_mean_.resize(shape.n_head_kv, shape.k_dim);
    for (Eigen::Index i = 0; i < key_mean_.size(); ++i) key_mean_.data()[i] = (i % 5 == 0) ? 3.0F * normal(rng_) : 0.2F;
    std::vector<LayerSpec> layers;
    for (int layer = 0; layer < 2; ++layer) layers.push_back(make_layer(layer));
    cache_ = std::make_unique<KvCache>(n_cells, shape.windows, std::move(layers));
  }

  // Rows at `cells` with `positions`, as one batch.
  void write(const std::vector<std::int64_t>& cells, const std::vector<std::int32_t>& positions, SeqId seq = 0) {
    const std::vector<SeqId> seqs(cells.size(), seq);
    cache_->place(cells, positions, seqs);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      for (int layer = 0; layer < 2; ++layer) {
        cache_->write_k(layer, cells[i], key_row(positions[i]));
        cache_->write_v(layer, cells[i], value_row());
      }
    }
  }
  // Positions [begin, end) at cells first_cell + position, in batches of `batch`.
  void append(std::int64_t first_cell, std::int32_t begin, std::int32_t end, std::int32_t batch, SeqId seq = 0) {
    while (begin < end) {
      const std::int32_t stop = std::min(end, begin + batch);
      std::vector<std::int64_t> cells;
      std::vector<std::int32_t> positions;
      for (; begin < stop; ++begin) {
        cells.push_back(first_cell + begin);
        positions.push_back(begin);
      }
      write(cells, positions, seq);
    }
  }

  [[nodiscard]] std::vector<float> key_row(std::int32_t position) {
    std::vector<float> row(static_cast<std::size_t>(shape_.n_head_kv * shape_.k_dim));
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = key_mean_.data()[i] + normal(rng_);
    const auto dim = static_cast<std::size_t>(shape_.k_dim);
    for (int h = 0; h < shape_.n_head_kv; ++h)
      rope_.apply(std::span(row).subspan(static_cast<std::size_t>(h) * dim, dim), position);
    return row;
  }
  [[nodiscard]] std::vector<float> value_row() {
    std::vector<float> row(static_cast<std::size_t>(shape_.n_head_kv * shape_.v_dim));
    for (float& x : row) x = 0.3F + normal(rng_);
    return row;
  }

  [[nodiscard]] KvCache& cache() { return *cache_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] std::mt19937& rng() { return rng_; }

 private:
  LayerSpec make_layer(int layer) {
    LayerSpec spec;
    spec.layer = layer;
    spec.n_head_kv = shape_.n_head_kv;
    spec.k_dim = shape_.k_dim;
    spec.v_dim = shape_.v_dim;
    spec.rope = rope_;
    if (!shape_.coded) return spec;
    if (shape_.spectral) {
      make_spectral(spec);
      return spec;
    }
    Int2Config k;
    k.n_head_kv = shape_.n_head_kv;
    k.head_dim = shape_.k_dim;
    k.rotation.push_back(random_rotation(shape_.k_dim, rng_));
    k.rope = rope_;
    if (shape_.mean == Mean::rope) k.mean_pre_rope = key_mean_;
    if (shape_.mean == Mean::fixed) k.mean_static = 0.5F * key_mean_;
    Int2Config v;
    v.n_head_kv = shape_.n_head_kv;
    v.head_dim = shape_.v_dim;
    v.rotation.push_back(random_rotation(shape_.v_dim, rng_));
    if (shape_.mean != Mean::none) v.mean_static = MatrixF::Constant(shape_.n_head_kv, shape_.v_dim, 0.3F);
    spec.k = make_int2_codec(std::move(k));
    spec.v = make_int2_codec(std::move(v));
    return spec;
  }

  // Widths 4, 2 and 0. Key coordinates are of one size here, so that wider codes have smaller steps and a query's integers are
  // coarser than on a model's keys, whose wide coordinates are large ones.
  void make_spectral(LayerSpec& spec) {
    SpectralKeyConfig k;
    k.n_head_kv = shape_.n_head_kv;
    k.head_dim = shape_.k_dim;
    k.rope = rope_;
    if (shape_.mean == Mean::rope) k.mean_pre_rope = key_mean_;
    if (shape_.mean == Mean::fixed) k.mean = 0.5F * key_mean_;
    const int quads = shape_.k_dim / 4;
    for (int h = 0; h < shape_.n_head_kv; ++h) {
      SpectralKeyHead head;
      head.transform = random_rotation(shape_.k_dim, rng_);
      head.inverse = head.transform.transpose();
      int digits = 0;
      for (int quad = 0; quad < quads; ++quad) {
        int width = (quad < quads / 4) ? 4 : 2;
        if (quad >= quads - 4) width = (digits % 16 != 0) ? 2 : 0;  // digits are a multiple of 16
        digits += 2 * width;
        for (int i = 0; i < 4; ++i) {
          head.width.push_back(width);
          head.step.push_back(width == 4 ? 0.335F : 1.0F);
          head.inverse_sigma.push_back(1.0F);
        }
      }
      k.heads.push_back(std::move(head));
    }
    spec.k = make_spectral_key_codec(std::move(k));
    SpectralValueConfig v;
    v.n_head_kv = shape_.n_head_kv;
    v.head_dim = shape_.v_dim;
    v.signs = MatrixF::Constant(shape_.n_head_kv, shape_.v_dim, 1.0F);
    v.signs(0, 1) = -1.0F;
    v.scale.assign(static_cast<std::size_t>(shape_.n_head_kv), 1.0F);
    spec.v = make_spectral_value_codec(std::move(v));
  }

  Shape shape_;
  std::mt19937 rng_;
  Rope rope_;
  MatrixF key_mean_;
  std::unique_ptr<KvCache> cache_;
};

// Queries on a world. Query and output rows are strided as a host's tensors are; the gaps must stay untouched.
class Queries {
 public:
  static constexpr float kUntouched = -77.5F;

  Queries(World& world, std::vector<std::int32_t> positions, std::int64_t first_cell, std::int64_t n_kv, int layer = 0)
      : world_(world), positions_(std::move(positions)) {
    const Shape& shape = world.shape();
    const int n_head = shape.n_head_kv * shape.group;
    const auto n_tokens = static_cast<std::int64_t>(positions_.size());
    args.cache = &world.cache();
    args.layer_index = layer;
    args.first_cell = first_cell;
    args.n_kv = n_kv;
    args.n_head = n_head;
    args.n_tokens = n_tokens;
    args.positions = positions_.data();
    args.q_head_stride = shape.k_dim + 3;
    args.q_token_stride = args.q_head_stride * n_head + 5;
    args.out_head_stride = shape.v_dim + 1;
    args.out_token_stride = args.out_head_stride * n_head + 2;
    args.scale = 1.5F / std::sqrt(static_cast<float>(shape.k_dim));
    q_.resize(static_cast<std::size_t>(n_tokens * args.q_token_stride));
    for (float& x : q_) x = normal(world.rng());
    args.q = q_.data();
  }

  // Additive mask: everything invisible until shown.
  void hide_all() {
    stride_ = args.n_kv + 3;
    mask_.assign(static_cast<std::size_t>(args.n_tokens * stride_), 0xFC00);
    args.mask = mask_.data();
    args.mask_token_stride = stride_;
  }
  void show(std::int64_t token, std::int64_t column, float bias = 0.0F) {
    mask_[static_cast<std::size_t>(token * stride_ + column)] = float_to_half(bias);
  }
  void set_sinks(std::vector<float> sinks) {
    sinks_ = std::move(sinks);
    args.sinks = sinks_.data();
  }
  void set_slopes(std::vector<float> slopes) {
    slopes_ = std::move(slopes);
    args.slopes = slopes_.data();
  }

  std::vector<float> reference() {
    std::vector<float> out = fresh_output();
    AttentionArgs a = args;
    a.out = out.data();
    attention_reference(a);
    return compact(out);
  }
  std::vector<float> job(int n_threads = 1) {
    AttentionJob attention;
    return job(attention, n_threads);
  }
  std::vector<float> job(AttentionJob& attention, int n_threads) {
    std::vector<float> out = fresh_output();
    AttentionArgs a = args;
    a.out = out.data();
    attention.prepare(a, n_threads);
    std::vector<std::thread> threads;
    for (int t = 1; t < n_threads; ++t) threads.emplace_back([&attention, t] { attention.run(t); });
    attention.run(0);
    for (std::thread& thread : threads) thread.join();
    return compact(out);
  }

  AttentionArgs args;

 private:
  [[nodiscard]] std::vector<float> fresh_output() const {
    return std::vector<float>(static_cast<std::size_t>(args.n_tokens * args.out_token_stride), kUntouched);
  }
  // [token][head][v_dim]; NaN everywhere if something was written outside.
  [[nodiscard]] std::vector<float> compact(const std::vector<float>& out) const {
    const int v_dim = world_.shape().v_dim;
    std::vector<float> rows;
    std::size_t untouched = 0;
    for (std::int64_t t = 0; t < args.n_tokens; ++t) {
      for (int h = 0; h < args.n_head; ++h) {
        const auto row = out.begin() + t * args.out_token_stride + h * args.out_head_stride;
        rows.insert(rows.end(), row, row + v_dim);
      }
    }
    for (const float x : out) untouched += static_cast<std::size_t>(x == kUntouched);
    if (untouched != out.size() - rows.size()) std::fill(rows.begin(), rows.end(), std::numeric_limits<float>::quiet_NaN());
    return rows;
  }

  World& world_;
  std::vector<std::int32_t> positions_;
  std::vector<float> q_, sinks_, slopes_;
  std::vector<std::uint16_t> mask_;
  std::int64_t stride_ = 0;
};

// Largest relative L2 difference over rows of `dim`; rows that are 0 in the reference must be 0.
inline double worst_row_error(const std::vector<float>& got, const std::vector<float>& want, int dim) {
  if (got.size() != want.size() || got.empty()) return std::numeric_limits<double>::infinity();
  double worst = 0.0;
  for (std::size_t begin = 0; begin < want.size(); begin += static_cast<std::size_t>(dim)) {
    double difference = 0.0;
    double norm = 0.0;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(dim); ++i) {
      const double w = static_cast<double>(want[i]);
      difference += std::pow(static_cast<double>(got[i]) - w, 2);
      norm += w * w;
    }
    if (!std::isfinite(difference) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
    if (norm == 0.0 && difference != 0.0) return std::numeric_limits<double>::infinity();
    if (norm != 0.0) worst = std::max(worst, std::sqrt(difference / norm));
  }
  return worst;
}

// An environment variable for the life of the object.
class Environment {
 public:
  Environment(std::string name, std::string_view value) : name_(std::move(name)) {
    setenv(name_.c_str(), std::string(value).c_str(), 1);
  }
  ~Environment() { unsetenv(name_.c_str()); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::string name_;
};

class CpuPath : Environment {
 public:
  explicit CpuPath(std::string_view name) : Environment("OSCAR_CPU", name) {}
};

inline std::vector<std::string> all_paths() {
  std::vector<std::string> names;
  for (const std::string_view name : cpu_paths()) names.emplace_back(name);
  return names;
}

// A path as part of a test's name, which takes no hyphen.
inline std::string path_label(const ::testing::TestParamInfo<std::string>& path) {
  std::string label = path.param;
  std::replace(label.begin(), label.end(), '-', '_');
  return label;
}

}  // namespace oscar::test

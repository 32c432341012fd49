// Synthetic activations of one layer, laid out as a host would hand them over, for tests of the collector and the fit.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "oscar/base/half.h"
#include "oscar/method/moments.h"

namespace oscar::test {

inline LayerShape layer_shape(int layer, int n_head, int n_head_kv, int dim, RopePairing pairing = RopePairing::neox) {
  LayerShape shape;
  shape.layer = layer;
  shape.n_head = n_head;
  shape.n_head_kv = n_head_kv;
  shape.k_dim = dim;
  shape.v_dim = dim;
  shape.rope.pairing = pairing;
  shape.rope.n_rot = pairing == RopePairing::none ? 0 : dim;
  return shape;
}

// Token-major rows: q, o [n, n_head, dim]; k, v [n, n_head_kv, dim].
struct Activations {
  LayerShape shape;
  std::vector<float> q, k, v, o;
  std::vector<std::int32_t> positions;

  Activations(const LayerShape& layer, std::int64_t n, std::int32_t first_position = 0) : shape(layer) {
    const auto rows = static_cast<std::size_t>(n);
    q.resize(rows * size_of(shape.n_head) * size_of(shape.k_dim));
    o.resize(rows * size_of(shape.n_head) * size_of(shape.v_dim));
    k.resize(rows * size_of(shape.n_head_kv) * size_of(shape.k_dim));
    v.resize(rows * size_of(shape.n_head_kv) * size_of(shape.v_dim));
    for (std::size_t i = 0; i < rows; ++i) positions.push_back(first_position + static_cast<std::int32_t>(i));
  }

  static std::size_t size_of(int n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(positions.size()); }

  // Independent normal values with a standard deviation that falls along the channels, so that moments are not flat.
  void fill_normal(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (auto* tensor : {&q, &k, &v, &o}) {
      for (std::size_t i = 0; i < tensor->size(); ++i) {
        const auto channel = static_cast<float>(i % size_of(shape.k_dim));
        (*tensor)[i] = normal(generator) / (1.0F + 0.1F * channel);
      }
    }
  }
  void round_to_half() {
    for (auto* tensor : {&q, &k, &v, &o}) {
      for (float& value : *tensor) value = half_to_float(float_to_half(value));
    }
  }

  float* q_row(std::int64_t token, int head) { return row(q, token, head, shape.n_head, shape.k_dim); }
  float* k_row(std::int64_t token, int head) { return row(k, token, head, shape.n_head_kv, shape.k_dim); }
  float* v_row(std::int64_t token, int head) { return row(v, token, head, shape.n_head_kv, shape.v_dim); }
  float* o_row(std::int64_t token, int head) { return row(o, token, head, shape.n_head, shape.v_dim); }

  [[nodiscard]] MomentCollector::Block block(std::int64_t begin, std::int64_t n) const {
    MomentCollector::Block b;
    b.n = n;
    b.positions = positions.data() + begin;
    b.q_head = b.k_head = shape.k_dim;
    b.v_head = b.o_head = shape.v_dim;
    b.q_token = static_cast<std::int64_t>(shape.n_head) * shape.k_dim;
    b.o_token = static_cast<std::int64_t>(shape.n_head) * shape.v_dim;
    b.k_token = static_cast<std::int64_t>(shape.n_head_kv) * shape.k_dim;
    b.v_token = static_cast<std::int64_t>(shape.n_head_kv) * shape.v_dim;
    b.q = q.data() + begin * b.q_token;
    b.k = k.data() + begin * b.k_token;
    b.v = v.data() + begin * b.v_token;
    b.o = o.data() + begin * b.o_token;
    return b;
  }

 private:
  static float* row(std::vector<float>& tensor, std::int64_t token, int head, int heads, int dim) {
    return tensor.data() + (token * heads + head) * dim;
  }
};

// All tokens of `a` in chunks of `chunk`, all heads in the calling thread.
inline MomentCollector collect(const Activations& a, std::int64_t chunk, CollectorConfig config = {}) {
  MomentCollector collector(a.shape, config);
  for (std::int64_t begin = 0; begin < a.tokens(); begin += chunk) {
    collector.add(a.block(begin, std::min(chunk, a.tokens() - begin)), 0, a.shape.n_head_kv);
  }
  collector.finish();
  return collector;
}

}  // namespace oscar::test

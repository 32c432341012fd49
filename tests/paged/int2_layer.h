// A small layer with the `int2` codec, as configurations from which codecs, pages and caches are made.
#pragma once

#include "codec/spectral_rows.h"
#include "oscar/paged/int2_pages.h"

namespace oscar::test {

struct Int2Layer {
  Int2Config keys, values;
};
enum class Int2Means { none, constant, pre_rope };  // of keys; with one of either kind values have one, too

// Rotations per head, clip ratios as published. A layer without means has none for values and one rotation for all heads.
inline Int2Layer int2_layer(int heads, int dim, unsigned seed, Int2Means means, RopePairing pairing = RopePairing::neox,
                            int n_rot = 0) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const auto random_mean = [&] {
    MatrixF mean(heads, dim);
    for (Eigen::Index i = 0; i < mean.size(); ++i) mean.data()[i] = normal(rng);
    return mean;
  };
  Int2Layer layer;
  for (Int2Config* side : {&layer.keys, &layer.values}) {
    side->n_head_kv = heads;
    side->head_dim = dim;
    for (int h = 0; h < (means == Int2Means::none ? 1 : heads); ++h) side->rotation.push_back(random_rotation(dim, rng()));
  }
  layer.keys.clip = {0.96F};
  layer.values.clip.assign(size_of(heads), 0.92F);
  layer.values.clip.back() = 0.0F;
  if (means == Int2Means::none) return layer;
  layer.values.mean_static = random_mean();
  if (means == Int2Means::constant) {
    layer.keys.mean_static = random_mean();
  } else {
    layer.keys.mean_pre_rope = random_mean();
    layer.keys.rope = rope_of(pairing, n_rot == 0 ? dim : n_rot, dim);
  }
  return layer;
}

}  // namespace oscar::test

// A small layer with the `spectral` codec, as configurations from which codecs, pages and caches are made.
#pragma once

#include <random>

#include "codec/spectral_rows.h"
#include "oscar/paged/spectral_pages.h"

namespace oscar::test {

struct SpectralLayer {
  SpectralKeyConfig keys;
  SpectralValueConfig values;
};

inline SpectralLayer spectral_layer(int heads, int dim, unsigned seed, RopePairing pairing = RopePairing::neox, int n_rot = 0) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  SpectralLayer layer;
  layer.keys.n_head_kv = layer.values.n_head_kv = heads;
  layer.keys.head_dim = layer.values.head_dim = dim;
  layer.keys.mean.resize(heads, dim);
  layer.keys.mean_pre_rope.resize(heads, dim);
  layer.values.signs.resize(heads, dim);
  for (Eigen::Index i = 0; i < layer.keys.mean.size(); ++i) {
    layer.keys.mean.data()[i] = 0.1F * normal(rng);
    layer.keys.mean_pre_rope.data()[i] = normal(rng);
    layer.values.signs.data()[i] = rng() % 2 == 0 ? 1.0F : -1.0F;
  }
  layer.keys.rope = rope_of(pairing, n_rot == 0 ? dim : n_rot, dim);
  for (int h = 0; h < heads; ++h) {
    layer.keys.heads.push_back(random_head(dim, seed + static_cast<unsigned>(h)));
    layer.values.scale.push_back(0.5F + 0.25F * static_cast<float>(h));
  }
  return layer;
}

}  // namespace oscar::test

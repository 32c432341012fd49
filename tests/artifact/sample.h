// A small sound artifact and what its tests share.
#pragma once

#include <Eigen/QR>

#include <random>

#include "io/scratch.h"
#include "oscar/artifact/artifact.h"

namespace oscar::test {

inline MatrixF random_rotation(int dim, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  MatrixD matrix(dim, dim);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = normal(engine);
  const Eigen::HouseholderQR<MatrixD> qr(matrix);
  return MatrixD(qr.householderQ()).cast<float>();
}

inline MatrixF random_rows(int rows, int dim, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  MatrixF matrix(rows, dim);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = normal(engine);
  return matrix;
}

inline LayerShape sample_shape(int layer) {
  LayerShape shape;
  shape.layer = layer;
  shape.n_head = 4;
  shape.n_head_kv = 2;
  shape.k_dim = 16;
  shape.v_dim = 8;
  shape.rope.pairing = RopePairing::neox;
  shape.rope.n_rot = 16;
  shape.rope.base = 1234.5F;
  shape.rope.freq_factors = {1, 2, 3, 4, 5, 6, 7, 8.25F};
  return shape;
}

// Layers 0 and 2 calibrated per head, layer 1 a sliding window.
inline Artifact sample_artifact() {
  Artifact artifact;
  artifact.model = {"f00d", "llama", "small \"model\"", 3};
  artifact.date = "2026-01-02T03:04:05Z";
  artifact.tool_version = "0.1.0";
  artifact.provenance = {{"sources", {{{"name", "text"}, {"sha256", "ab"}, {"tokens", 12}}}}, {"tokens", 12}, {"note", 0.1}};
  for (int number = 0; number < 3; ++number) {
    LayerArtifact layer;
    layer.shape = sample_shape(number);
    layer.shape.sliding_window = number == 1;
    if (number != 1) {
      const auto seed = static_cast<unsigned>(10 * number);
      layer.k_rotation = {random_rotation(16, seed), random_rotation(16, seed + 1)};
      layer.v_rotation = {random_rotation(8, seed + 2), random_rotation(8, seed + 3)};
      layer.k_eigenvalues = random_rows(2, 16, seed + 4);
      layer.k_mean_pre_rope = random_rows(2, 16, seed + 5);
      layer.k_mean = random_rows(2, 16, seed + 6);
      layer.v_mean = random_rows(2, 8, seed + 7);
      layer.clip_k = {0.96F, 0.9F};
      layer.clip_v = {0};
    }
    artifact.layers.push_back(std::move(layer));
  }
  return artifact;
}

}  // namespace oscar::test

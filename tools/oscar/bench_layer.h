// A layer of attention made up for `oscar bench --kernel`: the codecs a calibration would give, and rows that suit them.
//
// Keys: k_p = mu + RoPE_p(mu0) + z Q^T, with a random rotation Q and independent z_d ~ N(0, lambda_d), see key_variances().
// Values: N(0, 1).
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/cache/kv_cache.h"

namespace oscar::cli {

struct AttentionShape {
  int n_head = 0, n_head_kv = 0, dim = 0;
};
std::string to_text(const AttentionShape& shape);     // "12/2/128"
AttentionShape parse_shape(const std::string& text);  // Error naming the form and what the codecs need

class BenchLayer {
 public:
  // codec: "spectral" (2 bits), "int2" or "exact" (16-bit rows only).
  BenchLayer(const AttentionShape& shape, const std::string& codec, bool rope_mean);

  [[nodiscard]] const AttentionShape& shape() const { return shape_; }
  [[nodiscard]] std::size_t row_size() const {
    return static_cast<std::size_t>(shape_.n_head_kv) * static_cast<std::size_t>(shape_.dim);
  }
  [[nodiscard]] LayerSpec spec(int layer) const;  // with codecs of its own, as every layer of a model has
  // [row_size()] of the token at a position; the same on every call.
  void key(std::int64_t position, std::span<float> row) const;
  void value(std::int64_t position, std::span<float> row) const;

 private:
  AttentionShape shape_;
  std::string codec_;
  bool rope_mean_;
  Rope rope_;
  MatrixF rotation_;              // Q [D, D]
  std::vector<float> lambda_;     // [D]
  MatrixF mean_, mean_pre_rope_;  // [n_head_kv, D]
  MatrixF keys_, values_;         // [kPool, n_head_kv * D] without means, used again and again
};

// Descending, 1 on average, falling so that water-filling finds the widths that calibrated models have: 0, 2, 4 and 6 bits for
// .34, .40, .17 and .09 of the coordinates (means of four models; here .31, .44, .19 and .06).
std::vector<float> key_variances(int dim);
// Water-filling: widths of [D] coordinates of variances `lambda` (descending), 2 bits each on average, in quads.
std::vector<int> fill_widths(std::span<const float> lambda);

}  // namespace oscar::cli

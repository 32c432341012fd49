// Rotary position embedding as llama.cpp computes it, so that rows can be un-rotated, shifted, and means rotated.
//
// Angle of pair i at position p is p * theta_i; theta_i follows ggml's rope_yarn():
//   extrap = base^(-2i/n_rot) / freq_factor_i ; interp = freq_scale * extrap
//   theta_i = interp                                   when ext_factor == 0
//           = interp * (1 - m_i) + extrap * m_i        otherwise, m_i = ramp(low, high, i) * ext_factor
//   ramp = 1 - clamp((i - low) / max(.001, high - low), 0, 1), low = max(0, floor(d(beta_fast))),
//   high = min(n_rot - 1, ceil(d(beta_slow))), d(b) = n_rot ln(n_ctx_orig / (2 pi b)) / (2 ln base)
//   magnitude = attn_factor * (ext_factor != 0 ? 1 + 0.1 ln(1 / freq_scale) : 1)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oscar {

enum class RopePairing {
  none,  // the layer has no rotary embedding
  norm,  // pairs (2i, 2i + 1)
  neox,  // pairs (i, i + n_rot / 2)
};

// What a host must say about a layer's RoPE. Dimensions >= n_rot of a head are not rotated (partial rotary).
struct RopeParams {
  RopePairing pairing = RopePairing::none;
  int n_rot = 0;  // rotated dimensions per head, even
  float base = 10000.0F;
  float freq_scale = 1.0F;
  float ext_factor = 0.0F;
  float attn_factor = 1.0F;
  float beta_fast = 32.0F;
  float beta_slow = 1.0F;
  int n_ctx_orig = 0;
  std::vector<float> freq_factors;  // empty or n_rot / 2 values

  bool operator==(const RopeParams&) const = default;
};

class Rope {
 public:
  Rope() = default;
  // Throws Error when n_rot is odd, larger than head_dim, or freq_factors has the wrong length.
  Rope(RopeParams params, int head_dim);

  // In place on one head's row [head_dim]. apply() = what the model does (rotation times magnitude);
  // undo() is its inverse; shift() rotates an already rotated row by `delta` positions without the magnitude.
  void apply(std::span<float> row, std::int64_t position) const;
  void undo(std::span<float> row, std::int64_t position) const;
  void shift(std::span<float> row, std::int64_t delta) const;

  [[nodiscard]] const RopeParams& params() const { return params_; }
  [[nodiscard]] int head_dim() const { return head_dim_; }
  [[nodiscard]] std::span<const double> theta() const { return theta_; }  // [n_rot / 2], radians per position
  [[nodiscard]] double magnitude() const { return magnitude_; }
  // The two coordinates that pair i of theta() turns: (x, y) -> (x cos - y sin, x sin + y cos).
  [[nodiscard]] std::size_t first_of(std::size_t pair) const { return params_.pairing == RopePairing::norm ? 2 * pair : pair; }
  [[nodiscard]] std::size_t second_of(std::size_t pair) const {
    return params_.pairing == RopePairing::norm ? 2 * pair + 1 : pair + theta_.size();
  }

 private:
  void rotate(std::span<float> row, double position, double scale) const;

  RopeParams params_;
  int head_dim_ = 0;
  std::vector<double> theta_;
  double magnitude_ = 1.0;
};

}  // namespace oscar

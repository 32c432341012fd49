#include "oscar/method/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {
namespace {

// Pair index (real-valued) whose wavelength makes `turns` turns within the original context; YaRN (arXiv 2309.00071), eq. 17ff.
// In binary32 because the host rounds the result to an integer: the same rounding must come out here.
float pair_of_turns(const RopeParams& p, float turns) {
  const auto n_rot = static_cast<float>(p.n_rot);
  const auto context = static_cast<float>(p.n_ctx_orig);
  return n_rot * std::log(context / (turns * 2.0F * std::numbers::pi_v<float>)) / (2.0F * std::log(p.base));
}

// 1 for pairs faster than `low` (kept as trained), 0 for pairs slower than `high` (interpolated), linear between.
double ramp(double low, double high, double pair) {
  return 1.0 - std::clamp((pair - low) / std::max(0.001, high - low), 0.0, 1.0);
}

void validate(const RopeParams& p, int head_dim) {
  if (head_dim <= 0) fail("rope: head_dim {} is not positive", head_dim);
  if (p.n_rot <= 0 || p.n_rot % 2 != 0) fail("rope: n_rot {} is not a positive even number", p.n_rot);
  if (p.n_rot > head_dim) fail("rope: n_rot {} is larger than head_dim {}", p.n_rot, head_dim);
  if (!std::isfinite(p.base) || p.base <= 1.0F) fail("rope: base {} is not a finite number above 1", p.base);
  if (!std::isfinite(p.freq_scale) || p.freq_scale <= 0.0F)
    fail("rope: freq_scale {} is not a finite positive number", p.freq_scale);
  if (!std::isfinite(p.ext_factor)) fail("rope: ext_factor is not finite");
  if (!std::isfinite(p.attn_factor) || p.attn_factor == 0.0F)
    fail("rope: attn_factor {} is not a finite number other than 0", p.attn_factor);
  const auto pairs = static_cast<std::size_t>(p.n_rot / 2);
  if (!p.freq_factors.empty() && p.freq_factors.size() != pairs) {
    fail("rope: {} frequency factors for {} pairs", p.freq_factors.size(), pairs);
  }
  for (const float f : p.freq_factors) {
    if (!std::isfinite(f) || f == 0.0F) fail("rope: frequency factor {} is not a finite number other than 0", f);
  }
  if (p.ext_factor == 0.0F) return;
  if (p.n_ctx_orig <= 0) fail("rope: YaRN needs the original context length, but n_ctx_orig is {}", p.n_ctx_orig);
  if (!(p.beta_fast > 0.0F) || !(p.beta_slow > 0.0F) || !std::isfinite(p.beta_fast) || !std::isfinite(p.beta_slow)) {
    fail("rope: YaRN needs positive beta_fast and beta_slow, but they are {} and {}", p.beta_fast, p.beta_slow);
  }
}

}  // namespace

Rope::Rope(RopeParams params, int head_dim) : params_(std::move(params)), head_dim_(head_dim) {
  if (params_.pairing == RopePairing::none) return;
  validate(params_, head_dim);
  const RopeParams& p = params_;
  double low = 0.0;
  double high = 0.0;
  if (p.ext_factor != 0.0F) {
    low = std::max(0.0F, std::floor(pair_of_turns(p, p.beta_fast)));
    high = std::min(static_cast<float>(p.n_rot - 1), std::ceil(pair_of_turns(p, p.beta_slow)));
    magnitude_ = 1.0 + 0.1 * std::log(1.0 / static_cast<double>(p.freq_scale));
  }
  magnitude_ *= static_cast<double>(p.attn_factor);
  if (!std::isfinite(magnitude_) || magnitude_ == 0.0)
    fail("rope: the magnitude is {}: check freq_scale and attn_factor", magnitude_);

  theta_.resize(static_cast<std::size_t>(p.n_rot / 2));
  for (std::size_t i = 0; i < theta_.size(); ++i) {
    const double factor = p.freq_factors.empty() ? 1.0 : static_cast<double>(p.freq_factors[i]);
    const double extrapolated = std::pow(static_cast<double>(p.base), -2.0 * static_cast<double>(i) / p.n_rot) / factor;
    const double interpolated = static_cast<double>(p.freq_scale) * extrapolated;
    theta_[i] = interpolated;
    if (p.ext_factor != 0.0F) {
      const double mix = ramp(low, high, static_cast<double>(i)) * static_cast<double>(p.ext_factor);
      theta_[i] = interpolated * (1.0 - mix) + extrapolated * mix;
    }
  }
}

void Rope::rotate(std::span<float> row, double position, double scale) const {
  if (row.size() != static_cast<std::size_t>(head_dim_) && !theta_.empty()) {
    fail("rope: a row of {} values was given for head_dim {}", row.size(), head_dim_);
  }
  for (std::size_t i = 0; i < theta_.size(); ++i) {
    const double angle = position * theta_[i];
    const double c = std::cos(angle) * scale;
    const double s = std::sin(angle) * scale;
    float& first = row[first_of(i)];
    float& second = row[second_of(i)];
    const double x = static_cast<double>(first);
    const double y = static_cast<double>(second);
    first = static_cast<float>(x * c - y * s);
    second = static_cast<float>(x * s + y * c);
  }
}

void Rope::apply(std::span<float> row, std::int64_t position) const { rotate(row, static_cast<double>(position), magnitude_); }

void Rope::undo(std::span<float> row, std::int64_t position) const {
  rotate(row, -static_cast<double>(position), 1.0 / magnitude_);
}

void Rope::shift(std::span<float> row, std::int64_t delta) const { rotate(row, static_cast<double>(delta), 1.0); }

}  // namespace oscar

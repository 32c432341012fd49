#include "rivals/grids.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "oscar/base/half.h"

namespace oscar::rival {
namespace {

constexpr float kLargestHalf = 65504.0F;

float round_to_code(float x, int largest) { return std::clamp(std::floor(x + 0.5F), 0.0F, static_cast<float>(largest)); }

}  // namespace

float round_half(float x) { return half_to_float(float_to_half(std::clamp(x, -kLargestHalf, kLargestHalf))); }

void min_max(std::span<float> x, int bits) {
  if (x.empty()) return;
  const int largest = (1 << bits) - 1;
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  const float step = round_half((*high - *low) / static_cast<float>(largest));
  const float lo = round_half(*low);
  for (float& value : x) value = step > 0.0F ? lo + step * round_to_code((value - lo) / step, largest) : lo;
}

void min_max_groups(std::span<float> x, int group, int bits) {
  const auto size = static_cast<std::size_t>(group);
  for (std::size_t begin = 0; begin < x.size(); begin += size)
    min_max(x.subspan(begin, std::min(size, x.size() - begin)), bits);
}

void min_max_zero_point(std::span<float> x, int bits, float clip) {
  if (x.empty()) return;
  const int largest = (1 << bits) - 1;
  const auto [lowest, highest] = std::minmax_element(x.begin(), x.end());
  const float low = clip * *lowest;
  const float high = clip * *highest;
  const float step = round_half((high - low) / static_cast<float>(largest));
  if (!(step > 0.0F)) {  // all values alike: an exact constant is the best that one step can hold
    std::fill(x.begin(), x.end(), round_half(low));
    return;
  }
  const float zero = std::nearbyint(-low / step);
  for (float& value : x) {
    const float code = std::clamp(std::nearbyint(value / step) + zero, 0.0F, static_cast<float>(largest));
    value = step * (code - zero);
  }
}

void q8_0(std::span<float> block) {
  float largest = 0.0F;
  for (const float x : block) largest = std::max(largest, std::fabs(x));
  const float d = largest / 127.0F;
  const float inverse = d > 0.0F ? 1.0F / d : 0.0F;
  const float stored = round_half(d);
  for (float& x : block) x = stored * std::round(x * inverse);
}

void q4_0(std::span<float> block) {
  float extreme = 0.0F;
  for (const float x : block) {
    if (std::fabs(x) > std::fabs(extreme)) extreme = x;
  }
  const float d = extreme / -8.0F;
  const float inverse = d != 0.0F ? 1.0F / d : 0.0F;
  const float stored = round_half(d);
  for (float& x : block) x = stored * (std::clamp(std::floor(x * inverse + 8.5F), 0.0F, 15.0F) - 8.0F);
}

void q4_1(std::span<float> block) {
  if (block.empty()) return;
  const auto [lowest, highest] = std::minmax_element(block.begin(), block.end());
  const float low = *lowest;
  const float d = (*highest - low) / 15.0F;
  const float inverse = d > 0.0F ? 1.0F / d : 0.0F;
  const float stored = round_half(d);
  const float stored_low = round_half(low);
  for (float& x : block) x = stored * round_to_code((x - low) * inverse, 15) + stored_low;
}

float e4m3(float x) {
  constexpr float kLargest = 448.0F;
  constexpr int kSmallestExponent = -6;  // below: subnormal, steps of 2^-9
  constexpr int kMantissaBits = 3;
  const float magnitude = std::fabs(x);
  if (magnitude >= kLargest) return std::copysign(kLargest, x);
  const int exponent = magnitude > 0.0F ? std::max(std::ilogb(magnitude), kSmallestExponent) : kSmallestExponent;
  const float step = std::ldexp(1.0F, exponent - kMantissaBits);
  return std::copysign(step * std::nearbyint(magnitude / step), x);
}

std::vector<float> lloyd_max(int bits) {
  // By symmetry only the positive half is iterated: thresholds are midpoints, levels are the means between thresholds.
  const std::size_t half = std::size_t{1} << (bits - 1);
  const auto density = [](double t) { return std::exp(-0.5 * t * t) / std::sqrt(2.0 * std::numbers::pi); };
  const auto tail = [](double t) { return 0.5 * std::erfc(t / std::numbers::sqrt2); };
  std::vector<double> level(half);
  for (std::size_t i = 0; i < half; ++i) level[i] = 3.0 * (static_cast<double>(i) + 0.5) / static_cast<double>(half);
  double moved = 1.0;
  while (moved > 1e-12) {
    moved = 0.0;
    double from = 0.0;
    for (std::size_t i = 0; i < half; ++i) {
      const bool last = i + 1 == half;
      const double to = last ? std::numeric_limits<double>::infinity() : 0.5 * (level[i] + level[i + 1]);
      const double mean = (density(from) - (last ? 0.0 : density(to))) / (tail(from) - (last ? 0.0 : tail(to)));
      moved = std::max(moved, std::fabs(mean - level[i]));
      level[i] = mean;
      from = to;
    }
  }
  std::vector<float> levels;
  for (std::size_t i = half; i > 0; --i) levels.push_back(static_cast<float>(-level[i - 1]));
  for (const double value : level) levels.push_back(static_cast<float>(value));
  return levels;
}

float nearest(std::span<const float> levels, float x) {
  const auto above = std::lower_bound(levels.begin(), levels.end(), x);
  if (above == levels.begin()) return levels.front();
  if (above == levels.end()) return levels.back();
  return *above - x < x - *(above - 1) ? *above : *(above - 1);
}

}  // namespace oscar::rival

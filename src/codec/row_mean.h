// The mean that a codec removes from a row before coding and adds back after decoding, one per KV head:
//   mean(p) = offset + RoPE_p(pre_rope)
// Either part may be missing. The same operations in the same order on every processor: codes depend on them.
#pragma once

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/codec.h"

namespace oscar {

inline constexpr int kMaxHeadDim = 1024;  // bounds the stack buffers of one head
using HeadBuffer = std::array<float, kMaxHeadDim>;

class RowMean {
 public:
  RowMean() = default;
  // offset, pre_rope: [n_head_kv, head_dim] or empty; rope is needed by pre_rope only. Throws Error, which begins with `codec`,
  // on shapes that do not fit or values that are not finite.
  RowMean(std::string_view codec, MatrixF offset, MatrixF pre_rope, Rope rope, int n_head_kv, int head_dim);

  // What a position has in common for all heads; pass it to add(). Sines are dear: RoPE of the pairs (1, 0) is (cos, sin) times
  // the magnitude, from which each head's mean is turned by one complex product.
  void turn(std::int64_t position, HeadBuffer& turn) const;
  // x += sign * mean(p), sign +1 or -1.
  void add(int kv_head, const HeadBuffer& turn, float sign, HeadBuffer& x) const;

  [[nodiscard]] KeyMean key_mean(int kv_head) const;
  [[nodiscard]] std::span<const float> offset(int kv_head) const { return row(offset_, kv_head); }  // empty: none

 private:
  static std::span<const float> row(const MatrixF& m, int head) {
    if (m.size() == 0) return {};
    return {m.data() + static_cast<std::ptrdiff_t>(head) * m.cols(), static_cast<std::size_t>(m.cols())};
  }

  MatrixF offset_, pre_rope_;
  Rope rope_;
  std::vector<std::pair<std::size_t, std::size_t>> pairs_;
};

}  // namespace oscar

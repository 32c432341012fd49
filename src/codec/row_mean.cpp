#include "codec/row_mean.h"

#include "oscar/base/error.h"

namespace oscar {

RowMean::RowMean(std::string_view codec, MatrixF offset, MatrixF pre_rope, Rope rope, int n_head_kv, int head_dim)
    : offset_(std::move(offset)), pre_rope_(std::move(pre_rope)), rope_(std::move(rope)) {
  const auto check = [&](const MatrixF& mean, std::string_view what) {
    if (mean.size() == 0) return;
    if (mean.rows() != n_head_kv || mean.cols() != head_dim) {
      fail("{}: {} is {} x {}; expected [n_head_kv, head_dim] = {} x {}", codec, what, mean.rows(), mean.cols(), n_head_kv,
           head_dim);
    }
    if (!mean.allFinite()) fail("{}: {} contains NaN or Inf", codec, what);
  };
  check(offset_, "the static mean");
  check(pre_rope_, "the pre-RoPE mean");
  if (pre_rope_.size() == 0) return;
  if (rope_.params().pairing == RopePairing::none || rope_.head_dim() != head_dim) {
    fail("{}: a pre-RoPE mean needs the layer's RoPE for head_dim {}; use the static mean where there is none", codec,
         head_dim);
  }
  for (std::size_t i = 0; i < rope_.theta().size(); ++i) pairs_.emplace_back(rope_.first_of(i), rope_.second_of(i));
}

void RowMean::turn(std::int64_t position, HeadBuffer& turn) const {
  if (pairs_.empty()) return;
  turn.fill(0.0F);
  for (const auto& [first, second] : pairs_) turn[first] = 1.0F;
  rope_.apply(std::span(turn).first(static_cast<std::size_t>(rope_.head_dim())), position);
}

void RowMean::add(int kv_head, const HeadBuffer& turn, float sign, HeadBuffer& x) const {
  const std::span<const float> constant = row(offset_, kv_head);
  for (std::size_t d = 0; d < constant.size(); ++d) x[d] += sign * constant[d];
  if (pairs_.empty()) return;
  const std::span<const float> mean = row(pre_rope_, kv_head);
  for (const auto& [first, second] : pairs_) {
    const float c = turn[first];
    const float s = turn[second];
    x[first] += sign * (mean[first] * c - mean[second] * s);
    x[second] += sign * (mean[first] * s + mean[second] * c);
  }
  for (std::size_t d = 2 * pairs_.size(); d < mean.size(); ++d) x[d] += sign * mean[d];
}

KeyMean RowMean::key_mean(int kv_head) const {
  KeyMean mean{row(offset_, kv_head), row(pre_rope_, kv_head), nullptr};
  if (!mean.pre_rope.empty()) mean.rope = &rope_;
  return mean;
}

}  // namespace oscar

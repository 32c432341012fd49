// How far one model output is from another, and how sure we can be of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace oscar::cli {

struct Difference {                    // at one position, all in nats
  double kl = 0;                       // KL(base || other) over the whole vocabulary
  double nll_base = 0, nll_other = 0;  // -log p(next token)
  bool same_top = false;
};
// Log-softmax in double precision; `target` is the next token of the text. Error when a logit is NaN.
Difference difference(std::span<const float> base, std::span<const float> other, int target);

struct Estimate {
  double value = 0, low = 0, high = 0;  // 95 % confidence
};

struct Summary {
  std::int64_t positions = 0;
  Estimate kl_mean, same_top, ppl_ratio;  // ppl_ratio = exp(mean(nll_other - nll_base))
  double kl_median = 0, kl_p99 = 0, kl_max = 0;
  double ppl_base = 0, ppl = 0;
};
// Positions of a text are not independent: confidence comes from a bootstrap over blocks of `block` consecutive positions
// (1000 resamples, seeded: the same input gives the same interval everywhere), or over whole chunks (block = 0), which needs
// several. `chunks`: positions of each chunk, in order.
Summary summarise(const std::vector<std::vector<Difference>>& chunks, std::uint64_t seed, int block = 64);

// A share `hits` of `n` with its 95 % Wilson interval, sound for few and for extreme shares.
Estimate share_of(std::int64_t hits, std::int64_t n);

// log(sum(exp(logits))) in double precision: log p(token) = logits[token] - this. Error when a logit is NaN.
double log_sum_exp(std::span<const float> logits);

// Linear interpolation between order statistics; `share` in [0, 1]; sorted ascending, not empty.
double quantile(std::span<const double> sorted, double share);

}  // namespace oscar::cli

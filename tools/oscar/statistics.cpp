#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

constexpr int kResamples = 1000;

struct LogSoftmax {
  double log_sum = 0;
  std::size_t top = 0;
};

LogSoftmax log_softmax(std::span<const float> logits) {
  LogSoftmax out;
  out.top = static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const double top = static_cast<double>(logits[out.top]);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - top);
  out.log_sum = top + std::log(sum);
  if (!std::isfinite(out.log_sum)) fail("the model's logits are not finite");
  return out;
}

struct BlockSums {
  double kl = 0, same = 0, log_ratio = 0, n = 0;
};

Estimate interval(double value, std::vector<double> resampled) {
  std::sort(resampled.begin(), resampled.end());
  return {value, quantile(resampled, 0.025), quantile(resampled, 0.975)};
}

}  // namespace

Difference difference(std::span<const float> base, std::span<const float> other, int target) {
  if (base.empty() || base.size() != other.size() || target < 0 || static_cast<std::size_t>(target) >= base.size()) {
    fail("logits of {} and {} entries cannot be compared at token {}", base.size(), other.size(), target);
  }
  const LogSoftmax a = log_softmax(base), b = log_softmax(other);
  double kl = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const double log_p = static_cast<double>(base[i]) - a.log_sum;
    const double p = std::exp(log_p);
    if (p > 0) kl += p * (log_p - (static_cast<double>(other[i]) - b.log_sum));
  }
  const auto t = static_cast<std::size_t>(target);
  return {kl, a.log_sum - static_cast<double>(base[t]), b.log_sum - static_cast<double>(other[t]), a.top == b.top};
}

double log_sum_exp(std::span<const float> logits) { return log_softmax(logits).log_sum; }

Estimate share_of(std::int64_t hits, std::int64_t n) {
  if (n < 1 || hits < 0 || hits > n) fail("{} of {} is not a share", hits, n);
  constexpr double z = 1.959963984540054;  // 97.5 % of the normal distribution
  const double count = static_cast<double>(n), p = static_cast<double>(hits) / count;
  const double middle = (p + z * z / (2 * count)) / (1 + z * z / count);
  const double half = z / (1 + z * z / count) * std::sqrt(p * (1 - p) / count + z * z / (4 * count * count));
  // At 0 and 1 the bound is the share itself; rounding must not put it beside.
  return {p, std::min(p, middle - half), std::max(p, middle + half)};
}

double quantile(std::span<const double> sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Summary summarise(const std::vector<std::vector<Difference>>& chunks, std::uint64_t seed, int block) {
  std::vector<BlockSums> blocks;
  std::vector<double> kls;
  double kl = 0, same = 0, nll_base = 0, nll = 0;
  for (const auto& chunk : chunks) {
    for (std::size_t i = 0; i < chunk.size(); ++i) {
      if (i == 0 || (block > 0 && i % static_cast<std::size_t>(block) == 0)) blocks.emplace_back();
      const Difference& d = chunk[i];
      const double hit = d.same_top ? 1.0 : 0.0;
      kls.push_back(d.kl);
      kl += d.kl;
      same += hit;
      nll_base += d.nll_base;
      nll += d.nll_other;
      BlockSums& sums = blocks.back();
      sums.kl += d.kl;
      sums.same += hit;
      sums.log_ratio += d.nll_other - d.nll_base;
      sums.n += 1;
    }
  }
  if (kls.empty()) fail("there is no position to compare");
  std::sort(kls.begin(), kls.end());
  const double n = static_cast<double>(kls.size());

  // Drawn from the engine's own bits: the standard's distributions differ between libraries.
  std::mt19937_64 random(seed);
  std::vector<double> kl_means, sames, ratios;
  for (int r = 0; r < kResamples; ++r) {
    BlockSums sums;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const BlockSums& drawn = blocks[random() % blocks.size()];
      sums.kl += drawn.kl;
      sums.same += drawn.same;
      sums.log_ratio += drawn.log_ratio;
      sums.n += drawn.n;
    }
    kl_means.push_back(sums.kl / sums.n);
    sames.push_back(sums.same / sums.n);
    ratios.push_back(std::exp(sums.log_ratio / sums.n));
  }
  Summary out;
  out.positions = static_cast<std::int64_t>(kls.size());
  out.kl_mean = interval(kl / n, std::move(kl_means));
  out.same_top = interval(same / n, std::move(sames));
  out.ppl_ratio = interval(std::exp((nll - nll_base) / n), std::move(ratios));
  out.kl_median = quantile(kls, 0.5);
  out.kl_p99 = quantile(kls, 0.99);
  out.kl_max = kls.back();
  out.ppl_base = std::exp(nll_base / n);
  out.ppl = std::exp(nll / n);
  return out;
}

}  // namespace oscar::cli

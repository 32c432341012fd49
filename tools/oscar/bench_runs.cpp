#include "bench_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "machine.h"
#include "oscar/base/error.h"
#include "statistics.h"

namespace oscar::cli {

std::vector<Runs> take_runs(const RunLimits& limits, std::size_t contenders, std::size_t figures,
                            const std::function<std::vector<double>(std::size_t)>& measure,
                            const std::function<std::function<double()>()>& others) {
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const int fewest = std::min(kFewestRuns, limits.runs);
  std::vector<Runs> out(figures);
  std::vector<std::vector<Run>> disturbed(figures);
  double worst = 0;
  int quiet = 0;
  for (int taken = 0; taken < 2 * limits.runs; ++taken) {
    if (quiet >= limits.runs || (quiet >= fewest && spent() >= limits.budget)) break;
    if (taken >= 2 * fewest && spent() >= 2 * limits.budget) break;  // a machine that is never quiet
    std::vector<Run> run(figures);
    for (Run& figure : run) figure.values.resize(contenders);
    const auto used = others();
    for (std::size_t i = 0; i < contenders; ++i) {
      const std::size_t contender = (i + static_cast<std::size_t>(taken)) % contenders;  // nobody is always first
      if (contender > 1 && quiet >= limits.stock_runs) continue;
      const std::vector<double> values = measure(contender);
      for (std::size_t f = 0; f < figures; ++f) {
        if (!(values.at(f) > 0)) fail("a measurement gave {}, which is not a positive figure", values[f]);
        run[f].values[contender] = values[f];
      }
    }
    const double load = used();
    worst = std::max(worst, load);
    const bool calm = load <= limits.max_load;
    quiet += calm ? 1 : 0;
    for (std::size_t f = 0; f < figures; ++f) {
      run[f].others = load;
      (calm ? out[f].kept : disturbed[f]).push_back(std::move(run[f]));
    }
  }
  for (std::size_t f = 0; f < figures; ++f) {
    Runs& runs = out[f];
    runs.disturbed = static_cast<int>(disturbed[f].size());
    runs.worst_others = worst;
    if (quiet < fewest) {
      runs.noise = fmt::format("other programs used up to {:.2f} processors (limit {})", worst, limits.max_load);
      runs.kept.insert(runs.kept.end(), disturbed[f].begin(), disturbed[f].end());
      continue;
    }
    const std::optional<Spread> ratio = contenders > 1 ? ratio_of(runs, 1, 0) : std::nullopt;
    if (ratio && ratio->relative() > limits.max_spread) {
      runs.noise = fmt::format("the ratios of {} runs spread over {:.0f} % (limit {:.0f} %)", runs.kept.size(),
                               100 * ratio->relative(), 100 * limits.max_spread);
    }
  }
  return out;
}

std::function<double()> count_bystanders() {
  return [bystanders = Bystanders()] { return bystanders.processors(); };
}

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {quantile(values, 0.5), values.front(), values.back()};
}

std::optional<double> median_of(const Runs& runs, std::size_t contender) {
  std::vector<double> values;
  for (const Run& run : runs.kept) {
    if (run.values[contender]) values.push_back(*run.values[contender]);
  }
  if (values.empty()) return std::nullopt;
  return spread_of(std::move(values)).median;
}

std::optional<Spread> ratio_of(const Runs& runs, std::size_t a, std::size_t b) {
  std::vector<double> ratios;
  for (const Run& run : runs.kept) {
    if (run.values[a] && run.values[b]) ratios.push_back(*run.values[a] / *run.values[b]);
  }
  if (ratios.empty()) return std::nullopt;
  return spread_of(std::move(ratios));
}

}  // namespace oscar::cli

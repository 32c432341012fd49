// Paired measurements: in every run each contender is measured once, in turn, so that whatever changes slowly (clock,
// neighbours, temperature) hits all of them, and ratios are formed inside a run. Runs that other programs disturbed are taken
// again.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace oscar::cli {

struct RunLimits {
  int runs = 7;              // wanted
  int stock_runs = 3;        // contenders beyond the first two (quantised stock caches) take part in so many runs
  double budget = 60;        // seconds per case, from which on kFewestRuns are enough
  double max_load = 0.1;     // processors that others may use on average during a run
  double max_spread = 0.25;  // (largest - smallest ratio) / median
};
inline constexpr int kFewestRuns = 3;

struct Run {
  std::vector<std::optional<double>> values;  // one per contender; empty: did not take part
  double others = 0;                          // processors that other programs used
};

struct Runs {
  std::vector<Run> kept;
  int disturbed = 0;        // runs that were taken again
  double worst_others = 0;  // over all runs
  std::string noise;        // why the result cannot be trusted; empty: it can
};

// `measure(contender)` gives `figures` positive figures (decode and prefill of one process, say), each of which becomes Runs of
// its own; contender 0 is ours, 1 the base of ratios. `others` starts a count and returns the function that reads it
// (Bystanders; replaced by tests). When too few runs stay undisturbed, all are kept and `noise` says so.
std::vector<Runs> take_runs(const RunLimits& limits, std::size_t contenders, std::size_t figures,
                            const std::function<std::vector<double>(std::size_t)>& measure,
                            const std::function<std::function<double()>()>& others);
std::function<double()> count_bystanders();

struct Spread {
  double median = 0, min = 0, max = 0;
  [[nodiscard]] double relative() const { return (max - min) / median; }
};
Spread spread_of(std::vector<double> values);  // not empty

std::optional<double> median_of(const Runs& runs, std::size_t contender);  // empty: it never took part
// values of contenders a / b, run by run; empty when they never met.
std::optional<Spread> ratio_of(const Runs& runs, std::size_t a, std::size_t b);

}  // namespace oscar::cli

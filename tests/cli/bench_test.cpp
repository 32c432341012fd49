// The parts of `oscar bench` that need no llama.cpp: runs and their noise, rows, made-up layers, llama-bench's output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench_layer.h"
#include "bench_model.h"
#include "bench_report.h"
#include "bench_runs.h"
#include "child.h"
#include "machine.h"
#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

using Figures = std::vector<double>;

RunLimits limits(int runs) {
  RunLimits l;
  l.runs = runs;
  l.stock_runs = 2;
  l.budget = 1e6;
  return l;
}

// Loads of other programs, run by run; the last one stays.
std::function<std::function<double()>()> loads(std::vector<double> values) {
  const auto next = std::make_shared<std::size_t>(0);
  return [values = std::move(values), next] {
    const double load = values[std::min((*next)++, values.size() - 1)];
    return [load] { return load; };
  };
}

TEST(BenchRuns, EveryContenderTakesItsTurn) {
  std::vector<std::size_t> order;
  const Runs runs = take_runs(
                        limits(4), 3, 1,
                        [&](std::size_t i) {
                          order.push_back(i);
                          return Figures{1.0 + static_cast<double>(i)};
                        },
                        loads({0}))
                        .front();
  // The third one is quantised: in two runs only. Who is first changes.
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 1, 2, 0, 0, 1, 0, 1}));
  EXPECT_EQ(runs.kept.size(), 4U);
  EXPECT_TRUE(runs.noise.empty());
  EXPECT_EQ(median_of(runs, 2), 3.0);
  EXPECT_FALSE(runs.kept[2].values[2].has_value());
  EXPECT_EQ(ratio_of(runs, 2, 0)->median, 3.0);
}

TEST(BenchRuns, RatiosArePaired) {
  // The machine gets slower from run to run; the ratio inside a run does not change.
  double speed = 1;
  const Runs runs = take_runs(
                        limits(5), 2, 1,
                        [&](std::size_t i) {
                          speed *= 1.3;
                          return Figures{speed * (i == 0 ? 1 : 4)};
                        },
                        loads({0}))
                        .front();
  const Spread ratio = *ratio_of(runs, 1, 0);
  EXPECT_NEAR(ratio.min, 4 / 1.3, 1e-9);
  EXPECT_NEAR(ratio.max, 4 * 1.3, 1e-9);
  EXPECT_GT(median_of(runs, 0), 3.0);
}

TEST(BenchRuns, DisturbedRunsAreTakenAgain) {
  int calls = 0;
  const auto measure = [&](std::size_t) { return Figures{static_cast<double>(++calls), 7.0}; };
  const std::vector<Runs> both = take_runs(limits(3), 1, 2, measure, loads({0.5, 0, 0.11, 0.1, 0}));
  for (const Runs& runs : both) {
    EXPECT_EQ(runs.kept.size(), 3U);
    EXPECT_EQ(runs.disturbed, 2);
    EXPECT_EQ(runs.worst_others, 0.5);
    EXPECT_TRUE(runs.noise.empty()) << runs.noise;
  }
  EXPECT_EQ(median_of(both[0], 0), 4.0);  // of 2, 4 and 5
  EXPECT_EQ(median_of(both[1], 0), 7.0);
}

TEST(BenchRuns, ABusyMachineIsNamed) {
  const Runs runs = take_runs(
                        limits(3), 2, 1, [](std::size_t) { return Figures{1}; }, loads({0, 0.75}))
                        .front();
  EXPECT_EQ(runs.disturbed, 5);
  EXPECT_EQ(runs.kept.size(), 6U);  // for --allow-noisy
  EXPECT_NE(runs.noise.find("0.75 processors"), std::string::npos) << runs.noise;
}

TEST(BenchRuns, AWideSpreadIsNamed) {
  for (const auto& [last, noisy] : {std::pair{1.2, false}, std::pair{1.3, true}}) {
    int run = 0;
    const double value = last;
    const auto measure = [&](std::size_t i) { return Figures{i == 1 ? (run++ == 2 ? value : 1.0) : 1.0}; };
    const Runs runs = take_runs(limits(3), 2, 1, measure, loads({0})).front();
    EXPECT_EQ(runs.noise.find("3 runs spread over 30 %") != std::string::npos, noisy) << runs.noise;
  }
}

TEST(BenchRuns, TheBudgetEndsACase) {
  RunLimits l = limits(100);
  l.budget = 1e-9;
  EXPECT_EQ(take_runs(
                l, 1, 1, [](std::size_t) { return Figures{1}; }, loads({0}))
                .front()
                .kept.size(),
            3U);
  EXPECT_THROW(take_runs(
                   l, 1, 1, [](std::size_t) { return Figures{0}; }, loads({0})),
               Error);
}

TEST(BenchRuns, SpreadOf) {
  const Spread s = spread_of({4, 1, 2, 8});
  EXPECT_EQ(s.median, 3);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 8);
  EXPECT_DOUBLE_EQ(s.relative(), 7.0 / 3);
}

BenchRow row_of(bool rate) {
  BenchRow row;
  row.what = rate ? "tg32" : "decode";
  (rate ? row.model : row.shape) = rate ? "m.gguf" : "12/2/128";
  row.tokens = 1;
  row.depth = 2048;
  row.rate = rate;
  row.contenders = {"ours", "f16", "q4_0"};
  row.runs.kept = {{{10, 40, 100}, 0}, {{10, 60, std::nullopt}, 0}, {{20, 100, std::nullopt}, 0}};
  return row;
}

TEST(BenchReport, RatiosAboveOneMeanOursIsFaster) {
  const nlohmann::ordered_json time = to_json(row_of(false));
  EXPECT_EQ(time["unit"], "us");
  EXPECT_EQ(time["ours"], 10);
  EXPECT_EQ(time["stock_f16"], 60);
  EXPECT_TRUE(time["stock_q8_0"].is_null());
  EXPECT_TRUE(time["ratio_q8_0"].is_null());
  EXPECT_EQ(time["ratio_f16"], (nlohmann::ordered_json{{"median", 5.0}, {"min", 4.0}, {"max", 6.0}}));
  EXPECT_EQ(time["ratio_q4_0"]["median"], 10);
  EXPECT_EQ(time["runs"], 3);
  EXPECT_EQ(time["samples"]["q4_0"], (nlohmann::ordered_json{100.0, nullptr, nullptr}));
  const nlohmann::ordered_json rate = to_json(row_of(true));
  EXPECT_EQ(rate["unit"], "t/s");
  EXPECT_FALSE(rate.contains("shape"));
  EXPECT_DOUBLE_EQ(rate["ratio_f16"]["median"].get<double>(), 0.2);
}

TEST(BenchReport, TheTableShowsWhatWasMeasured) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array({to_json(row_of(false)), to_json(row_of(true))});
  rows[1]["noise"] = "too loud";
  const std::string table = bench_table(rows).markdown();
  EXPECT_NE(table.find("x f16"), std::string::npos);
  EXPECT_EQ(table.find("q8_0"), std::string::npos);
  EXPECT_NE(table.find("4 - 6"), std::string::npos) << table;
  EXPECT_NE(table.find("m.gguf"), std::string::npos);
  EXPECT_NE(table.find("NOISY: too loud"), std::string::npos);
}

TEST(BenchLayer, Shapes) {
  const AttentionShape shape = parse_shape("12/2/128");
  EXPECT_EQ(to_text(shape), "12/2/128");
  for (const char* wrong : {"", "12", "12/2", "12/2/", "12/2/128/4", "12/5/128", "0/1/64", "12/0/64", "4/2/48", "4/2/1024",
                            "a/b/c", "-12/2/64", "12/-2/64", "12/2/64x"}) {
    EXPECT_THROW(parse_shape(wrong), Error) << wrong;
  }
}

TEST(BenchLayer, WidthsShareOutTwoBits) {
  for (const int dim : {32, 64, 96, 128, 256}) {
    const std::vector<int> width = fill_widths(key_variances(dim));
    EXPECT_EQ(std::accumulate(width.begin(), width.end(), 0), 2 * dim);
    EXPECT_TRUE(std::is_sorted(width.rbegin(), width.rend()));
    const auto share = [&](int bits) { return static_cast<double>(std::count(width.begin(), width.end(), bits)) / dim; };
    EXPECT_NEAR(share(0), 0.34, 0.1) << dim;  // as calibrated models
    EXPECT_NEAR(share(2), 0.40, 0.1) << dim;
    EXPECT_NEAR(share(6), 0.09, 0.1) << dim;
  }
}

TEST(BenchLayer, CodecsSuitItsRows) {
  for (const char* codec : {"spectral", "int2"}) {
    const BenchLayer layer({6, 2, 64}, codec, true);
    const LayerSpec spec = layer.spec(0);
    EXPECT_FALSE(spec.k->key_mean(0).pre_rope.empty());
    std::vector<float> row(layer.row_size());
    std::vector<float> back(row.size());
    double error = 0, energy = 0;
    for (const bool is_k : {true, false}) {
      for (std::int64_t position = 0; position < 200; ++position) {
        is_k ? layer.key(position, row) : layer.value(position, row);
        const Codec& c = is_k ? *spec.k : *spec.v;
        std::vector<std::uint8_t> code(c.row_bytes());
        EncodeStats stats;
        c.encode(row, position, code, stats);
        c.decode(code, position, back);
        for (std::size_t i = 0; i < row.size(); ++i) {
          error += static_cast<double>(row[i] - back[i]) * static_cast<double>(row[i] - back[i]);
          energy += static_cast<double>(row[i]) * static_cast<double>(row[i]);
        }
      }
      EXPECT_LT(error / energy, 0.32) << codec;
      EXPECT_GT(error / energy, 0.01) << codec;
    }
  }
  EXPECT_EQ(BenchLayer({6, 2, 64}, "exact", true).spec(0).k, nullptr);
  EXPECT_TRUE(BenchLayer({6, 2, 64}, "spectral", false).spec(0).k->key_mean(1).pre_rope.empty());
  EXPECT_THROW(BenchLayer({6, 2, 64}, "fp4", true), Error);
}

ModelBench at_depth(std::int64_t depth) {
  ModelBench bench;
  bench.llama_bench = "llama-bench";
  bench.depth = depth;
  return bench;
}

TEST(BenchModel, ReadsLlamaBench) {
  const std::string text = R"([
    {"n_prompt": 512, "n_gen": 0, "n_depth": 64, "avg_ts": 3, "samples_ts": [ 1.0, 2.0, 9.0 ]},
    {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "samples_ts": [ 77 ]},
    {"n_prompt": 0, "n_gen": 32, "n_depth": 64, "samples_ts": [ 8, 10 ]} ])";
  const ModelSpeed speed = parse_llama_bench(text, at_depth(64));
  EXPECT_EQ(speed.prefill, 2);
  EXPECT_EQ(speed.decode, 9);
  EXPECT_THROW(parse_llama_bench(text, at_depth(0)), Error);  // no tg there
  for (const char* wrong : {"", "{}", "[1, \"x\"]", "[{\"n_depth\": 64}]", "error: no model"}) {
    EXPECT_THROW(parse_llama_bench(wrong, at_depth(64)), Error) << wrong;
  }
}

TEST(Child, OutputAndExitCode) {
  const ChildOutput done = run_captured({"/bin/sh", "-c", "echo $WORD; echo no >&2; exit 5"}, {{"WORD", "yes"}});
  EXPECT_EQ(done.code, 5);
  EXPECT_EQ(done.out, "yes\n");
  EXPECT_EQ(done.err, "no\n");
  EXPECT_EQ(run_captured({"/bin/sh", "-c", "kill -TERM $$"}, {}).code, 128 + 15);
  const ChildOutput missing = run_captured({"/nowhere/program"}, {});
  EXPECT_NE(missing.code, 0);
  EXPECT_NE(missing.err.find("cannot be started"), std::string::npos);
  // More than a pipe holds, on both at once.
  const ChildOutput large = run_captured({"/bin/sh", "-c", "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero"}, {});
  EXPECT_EQ(large.out.size(), 300000U);
  EXPECT_EQ(large.err.size(), 300000U);
}

TEST(Machine, IsDescribed) {
  const Machine m = this_machine();
  EXPECT_FALSE(m.cpu.empty());
  EXPECT_GE(m.processors, 1);
  EXPECT_GT(core_hertz(), 1e8);
  EXPECT_LT(core_hertz(), 2e10);
}

}  // namespace
}  // namespace oscar::cli

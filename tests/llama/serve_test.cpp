// Modes exact and oscar on real models: everything is served, the memory is what the codec says, and the answers are those of
// stock llama.cpp up to the rounding noise of its own 8-bit matrix products.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <ostream>

#include "llama/harness.h"

namespace oscar::testing {
namespace {

struct Case {
  const char* name;
  const ModelUnderTest* model;
  std::size_t prompt;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::string case_name(const ::testing::TestParamInfo<Case>& tested) { return tested.param.name; }

class Serve : public ::testing::TestWithParam<Case> {
 protected:
  Scratch scratch_;
};

// Windows small enough that a short prompt has coded rows in every layer.
const std::map<std::string, std::string> kSmallWindows{{"OSCAR_SINK", "16"}, {"OSCAR_RECENT", "64"}, {"OSCAR_ROLLBACK", "16"}};

// `graphs` batches went through every layer: all full-attention operations served, all sliding-window ones left to stock.
void expect_all_served(const json& stats, const ModelUnderTest& model, int graphs) {
  EXPECT_EQ(stats.at("graphs"), graphs);
  EXPECT_EQ(stats.at("attention_served"), graphs * model.n_full);
  EXPECT_EQ(stats.at("attention_bypassed"), 0);
  EXPECT_EQ(stats.at("attention_sliding_window"), graphs * (model.n_layer - model.n_full));
  EXPECT_TRUE(stats.at("refused").is_null()) << stats.at("refused");
  int layers = 0;
  for (const json& cache : stats.at("caches")) {
    if (cache.at("sliding_window").get<bool>()) continue;
    layers += static_cast<int>(cache.at("layers").size());
    EXPECT_EQ(cache.at("nominal_resident_bytes"), 0);
    EXPECT_GT(cache.at("nominal_bytes").get<std::int64_t>(), 0);
  }
  EXPECT_EQ(layers, model.n_full);
}

json prompt_script(std::size_t prompt) {
  return {context({{"n_ctx", 1024}, {"n_batch", 128}, {"n_ubatch", 128}, {"swa_full", false}}),
          decode(part(0, 1, 0, prompt), 1, 128), decode(part(0, 1, prompt, 4), 4, 1),
          decode(part(0, 1, prompt + 4, 60), 60, 64), stats_step()};
}
int prompt_graphs(std::size_t prompt) { return static_cast<int>((prompt + 127) / 128) + 4 + 1; }

// Every row kept at 16 bit: our attention against double precision, operation by operation, while the model runs.
TEST_P(Serve, ExactModeAgreesWithDoublePrecision) {
  const Case& c = GetParam();
  const RunResult run =
      run_driver(scratch_, *c.model, prompt_script(c.prompt), {.mode = "exact", .environment = {{"OSCAR_CHECK", "1"}}});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  const json stats = run.stats();
  expect_all_served(stats, *c.model, prompt_graphs(c.prompt));
  EXPECT_GT(stats.at("checked_rows").get<std::int64_t>(), 0);
  EXPECT_LE(stats.at("worst_relative_error").get<double>(), 2e-5);
  EXPECT_GT(stats.at("worst_relative_error").get<double>(),
            0.0);  // F32 against double: equality would mean nothing was compared

  const RunResult stock = run_driver(scratch_, *c.model, prompt_script(c.prompt), {.mode = "stock"});
  ASSERT_EQ(stock.exit_code, 0) << stock.errors;
  ASSERT_EQ(stock.rows(), run.rows());
  double mean = 0;
  for (std::size_t i = 0; i < stock.rows(); ++i)
    mean += kl_divergence(stock.row(i), run.row(i)) / static_cast<double>(stock.rows());
  EXPECT_LT(mean, 0.1);  // measured 0.003 .. 0.03: stock rounds Q and the probabilities to 16 bit
}

TEST_P(Serve, OscarModeServesEverythingWithinTheReference) {
  const Case& c = GetParam();
  std::map<std::string, std::string> environment = kSmallWindows;
  environment["OSCAR_CHECK"] = "1";
  const RunResult run =
      run_driver(scratch_, *c.model, prompt_script(c.prompt),
                 {.mode = "oscar", .artifact = write_hadamard_artifact(scratch_, *c.model), .environment = environment});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  const json stats = run.stats();
  expect_all_served(stats, *c.model, prompt_graphs(c.prompt));
  EXPECT_GT(stats.at("checked_rows").get<std::int64_t>(), 0);
  // Qwen2.5's key biases, which this artifact keeps, make logits of hundreds: F32 leaves 1e-4 of the output there.
  const bool huge_logits = c.model == &qwen05b() || c.model == &qwen15b();
  EXPECT_LE(stats.at("worst_relative_error").get<double>(), huge_logits ? 3e-4 : 2e-5);
  EXPECT_GT(stats.at("worst_relative_error").get<double>(), 0.0);
  for (const float x : run.logits) ASSERT_TRUE(std::isfinite(x));
}

INSTANTIATE_TEST_SUITE_P(Models, Serve,
                         ::testing::Values(Case{"smollm2", &smollm2(), 384}, Case{"qwen05b", &qwen05b(), 256},
                                           Case{"gemma270m", &gemma270m(), 640}, Case{"qwen15b", &qwen15b(), 128}),
                         case_name);

// Programs like llama-imatrix watch nodes, which cuts every graph into slices; a policy epoch is a batch, not a slice.
TEST(ServeSlices, EvalCallbackChangesNothing) {
  const Scratch scratch;
  const std::string artifact = write_hadamard_artifact(scratch, smollm2());
  const auto run = [&](bool observe) {
    const RunResult result = run_driver(scratch, smollm2(),
                                        {context({{"n_ctx", 512}, {"observe", observe}}), decode(part(0, 1, 0, 200), 1, 64),
                                         decode(part(0, 1, 200, 8), 8, 2), stats_step()},
                                        {.mode = "oscar", .artifact = artifact, .environment = kSmallWindows});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result;
  };
  const RunResult whole = run(false);
  const RunResult sliced = run(true);
  EXPECT_TRUE(same_bits(whole.logits, sliced.logits));
  for (const RunResult* result : {&whole, &sliced}) {
    EXPECT_EQ(result->stats().at("attention_served"), 8 * 30);
    EXPECT_EQ(result->stats().at("attention_bypassed"), 0);
    EXPECT_EQ(result->stats().at("caches").at(0).at("window_misses"), 0);
    EXPECT_EQ(result->stats().at("caches").at(0).at("rows_written"), 208);
  }
}

const json& only_cache(const json& stats) {
  const json& caches = stats.at("caches");
  EXPECT_EQ(caches.size(), 1U);
  return caches.at(0);
}

// The memory claim: a token costs its code and nothing else once the windows are full.
TEST(ServeMemory, ACodedTokenCostsItsCodeOnly) {
  const Scratch scratch;
  const ModelUnderTest& model = smollm2();
  const json script = {context({{"n_ctx", 4096}, {"n_batch", 256}, {"n_ubatch", 256}}),
                       decode(part(0, 1, 0, 768), 1, 256),
                       decode(part(0, 1, 768, 1), 1, 1),
                       stats_step(),
                       memory_step(),
                       decode(part(0, 1, 769, 1024), 1, 256),
                       decode(part(0, 1, 1793, 1), 1, 1),
                       stats_step(),
                       memory_step(),
                       {{"do", "clear"}, {"data", true}},
                       stats_step()};
  const RunResult run =
      run_driver(scratch, model, script, {.mode = "oscar", .artifact = write_hadamard_artifact(scratch, model)});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  const json before = only_cache(run.result(3).at("stats"));
  const json after = only_cache(run.result(7).at("stats"));
  const json cleared = only_cache(run.result(10).at("stats"));
  const std::int64_t row = std::int64_t{2} * model.n_head_kv * (model.head_dim / 4 + 4) * model.n_layer;  // K and V, all layers
  const std::int64_t exact_row = std::int64_t{2} * model.n_head_kv * model.head_dim * 2 * model.n_layer;
  const auto bytes = [](const json& cache, const char* key) { return cache.at(key).get<std::int64_t>(); };

  EXPECT_EQ(bytes(before, "cells_used"), 769);
  EXPECT_EQ(bytes(after, "cells_used"), 1794);
  EXPECT_EQ(bytes(before, "code_bytes"), 769 * row);
  EXPECT_EQ(bytes(after, "code_bytes"), 1794 * row);
  EXPECT_EQ(bytes(before, "exact_bytes"), (64 + 256 + 64) * exact_row);
  EXPECT_EQ(bytes(after, "exact_bytes"), bytes(before, "exact_bytes"));
  EXPECT_EQ(bytes(after, "peak_exact_bytes"), bytes(before, "peak_exact_bytes"));
  EXPECT_EQ(bytes(after, "nominal_resident_bytes"), 0);
  EXPECT_EQ(bytes(after, "window_misses"), 0);
  EXPECT_NEAR(after.at("bits_per_element").get<double>(), 2.5, 1e-9);
  // Measured pages: growth is the codes', up to a page at either end of every region (K and V of each layer).
  const std::int64_t growth = bytes(after, "resident_bytes") - bytes(before, "resident_bytes");
  const std::int64_t slack = std::int64_t{2} * model.n_layer * 2 * 4096;
  EXPECT_GE(growth, 1025 * row - slack);
  EXPECT_LE(growth, 1025 * row + slack);
  // The whole process agrees: nothing else grows with the context (4 MiB for the heap; rows at 16 bit would be 22 MiB more).
  const std::int64_t process =
      (run.result(8).at("rss_kib").get<std::int64_t>() - run.result(4).at("rss_kib").get<std::int64_t>()) * 1024;
  EXPECT_LE(process, 1025 * row + slack + (4 << 20));
  EXPECT_EQ(bytes(cleared, "cells_used"), 0);
  EXPECT_EQ(bytes(cleared, "code_bytes"), 0);
  EXPECT_LE(bytes(cleared, "resident_bytes"), slack);
}

// D20: a warm-up with an empty batch, a context that is created and never used, and one used after a cleared one.
TEST(ServeLife, D20EmptyBatchAndUnusedContext) {
  const Scratch scratch;
  const json script = {context({{"n_ctx", 512}}),
                       {{"do", "empty"}},
                       {{"do", "clear"}},
                       stats_step(),
                       {{"do", "free"}},
                       context({{"n_ctx", 512}}),
                       {{"do", "empty"}},
                       decode(part(0, 1, 0, 40), 2),
                       stats_step()};
  const RunResult stock = run_driver(scratch, smollm2(), script, {.mode = "stock"});
  const RunResult run =
      run_driver(scratch, smollm2(), script, {.mode = "oscar", .artifact = write_hadamard_artifact(scratch, smollm2())});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(run.result(1).at("code"), stock.result(1).at("code"));
  EXPECT_EQ(run.result(3).at("stats").at("attention_served"), 0);
  EXPECT_EQ(run.stats().at("attention_served"), 30);
  EXPECT_EQ(run.stats().at("attention_bypassed"), 0);
}

// D20: rows are stored by a graph that never attends, so nothing has told the plug-in who may see them.
TEST(ServeLife, D20StoresWithoutAttention) {
  const Scratch scratch;
  const json script = {{{"do", "store_only"}, {"width", 192}, {"head_dim", 64}, {"rows", 20}}, stats_step()};
  for (const char* mode : {"delegate", "exact", "oscar"}) {
    SCOPED_TRACE(mode);
    RunOptions options{.mode = mode};
    if (options.mode == "oscar") options.artifact = write_hadamard_artifact(scratch, smollm2());
    const RunResult run = run_driver(scratch, smollm2(), script, options);
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_LT(run.result(0).at("worst").get<double>(), 1e-3);  // values up to 1 in binary16, one unit in the last place
    EXPECT_EQ(run.stats().at("attention_served"), 0);
    EXPECT_EQ(run.stats().at("attention_bypassed"), 0);
  }
}

// D11: gemma's windows are 512 tokens long; past them, with both sizes of the sliding cache.
TEST(ServeSlidingWindow, D11PastTheWindow) {
  const Scratch scratch;
  const std::string artifact = write_hadamard_artifact(scratch, gemma270m());
  for (const bool swa_full : {true, false}) {
    SCOPED_TRACE(swa_full ? "swa_full" : "bounded");
    const json script = {context({{"n_ctx", 1280}, {"swa_full", swa_full}}), decode(part(0, 1, 0, 1000), 1, 256),
                         decode(part(0, 1, 1000, 32), 32, 32), stats_step()};
    const RunResult stock = run_driver(scratch, gemma270m(), script, {.mode = "stock"});
    ASSERT_EQ(stock.exit_code, 0) << stock.errors;
    const RunResult exact = run_driver(scratch, gemma270m(), script, {.mode = "exact"});
    ASSERT_EQ(exact.exit_code, 0) << exact.errors;
    expect_all_served(exact.stats(), gemma270m(), 5);
    double mean = 0;
    for (std::size_t i = 0; i < stock.rows(); ++i)
      mean += kl_divergence(stock.row(i), exact.row(i)) / static_cast<double>(stock.rows());
    EXPECT_LT(mean, 0.1);
    const RunResult oscar = run_driver(scratch, gemma270m(), script, {.mode = "oscar", .artifact = artifact});
    ASSERT_EQ(oscar.exit_code, 0) << oscar.errors;
    expect_all_served(oscar.stats(), gemma270m(), 5);
    int sliding = 0;
    const json stats = oscar.stats();
    for (const json& cache : stats.at("caches")) {
      if (cache.at("sliding_window").get<bool>()) sliding += static_cast<int>(cache.at("layers").size());
    }
    EXPECT_EQ(sliding, 15);
  }
}

}  // namespace
}  // namespace oscar::testing

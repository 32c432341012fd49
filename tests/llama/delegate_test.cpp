// Delegate mode only forwards: every logit must be bit-identical to stock llama.cpp, on every model, in every slot layout.
#include <gtest/gtest.h>

#include <ostream>

#include "llama/harness.h"

namespace oscar::testing {
namespace {

struct Case {
  const char* name;
  const ModelUnderTest* model;
  std::size_t prompt;  // tokens of the longest prompt
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Delegate : public ::testing::TestWithParam<Case> {
 protected:
  void expect_identical(const json& script) const {
    const RunResult stock = run_driver(scratch_, *GetParam().model, script, {.mode = "stock"});
    ASSERT_EQ(stock.exit_code, 0) << stock.errors;
    ASSERT_FALSE(stock.output.at("loaded").get<bool>());
    const RunResult delegate = run_driver(scratch_, *GetParam().model, script, {.mode = "delegate"});
    ASSERT_EQ(delegate.exit_code, 0) << delegate.errors;
    ASSERT_TRUE(delegate.output.at("loaded").get<bool>());
    ASSERT_EQ(stock.rows(), delegate.rows());
    ASSERT_GT(stock.rows(), 0U);
    for (std::size_t i = 0; i < stock.rows(); ++i) EXPECT_TRUE(same_bits(stock.row(i), delegate.row(i))) << "row " << i;
    const json stats = delegate.stats();
    EXPECT_EQ(stats.at("mode"), "delegate");
    EXPECT_EQ(stats.at("attention_bypassed"), 0);
    EXPECT_GT(stats.at("graphs").get<int>(), 0);
    EXPECT_EQ(stats.at("attention_delegated"), stats.at("graphs").get<int>() * GetParam().model->n_layer);
  }

  Scratch scratch_;
};

// A prompt at two depths, a removed tail, a saved and restored state, a context shift, a few generated tokens.
TEST_P(Delegate, OneSequence) {
  const std::size_t n = GetParam().prompt;
  const int end = static_cast<int>(n);
  const std::string state = scratch_.file("state");
  expect_identical({context({{"n_ctx", 1024}, {"swa_full", false}}),
                    decode(part(0, 1, 0, n / 2), 2, 200),
                    decode(part(0, 1, n / 2, n - n / 2), 3),
                    {{"do", "save"}, {"file", state}},
                    {{"do", "greedy"}, {"pos", end}, {"count", 4}},
                    {{"do", "clear"}},
                    {{"do", "load"}, {"file", state}},
                    decode(part(0, 1, n, 3), 3),
                    stats_step()});
}

TEST_P(Delegate, RemovedAndShifted) {
  const std::size_t n = GetParam().prompt / 2;
  const int end = static_cast<int>(n);
  expect_identical({context({{"n_ctx", 512}, {"swa_full", true}}),
                    decode(part(0, 2, 0, n)),
                    {{"do", "rm"}, {"p0", end - 20}},
                    decode(part(0, 3, n - 20, 20), 2),
                    {{"do", "rm"}, {"p0", 8}, {"p1", 40}},
                    {{"do", "add"}, {"p0", 40}, {"p1", -1}, {"delta", -32}},
                    {{"do", "decode"}, {"parts", {{{"seed", 2}, {"from", n}, {"count", 5}, {"pos", end - 32}}}}, {"logits", 5}},
                    stats_step()});
}

// Three prompts of different lengths, together and one after another, then a copied sequence that goes its own way.
json slots(std::size_t n, bool unified) {
  const int end = static_cast<int>(n);
  return {context({{"n_ctx", 1536}, {"n_seq_max", 4}, {"kv_unified", unified}}),
          decode({part(0, 4, 0, n), part(1, 5, 0, n / 2), part(2, 6, 0, n / 3)}, 1),
          decode({part(0, 4, n, 4), part(1, 5, n / 2, 4)}, 4),
          {{"do", "cp"}, {"from", 1}, {"to", 3}},
          decode({part(3, 7, n / 2 + 4, 3), part(0, 4, n + 4, 3)}, 3),
          {{"do", "rm"}, {"seq", 0}, {"p0", end - 10}},
          decode({part(0, 8, n - 10, 2), part(1, 5, n / 2 + 4, 2)}, 2),
          stats_step()};
}
TEST_P(Delegate, ThreeSlotsUnified) { expect_identical(slots(GetParam().prompt / 2, true)); }
TEST_P(Delegate, ThreeSlotsStreams) { expect_identical(slots(GetParam().prompt / 2, false)); }

INSTANTIATE_TEST_SUITE_P(Models, Delegate,
                         ::testing::Values(Case{"smollm2", &smollm2(), 400}, Case{"qwen05b", &qwen05b(), 200},
                                           Case{"gemma270m", &gemma270m(), 640}, Case{"qwen15b", &qwen15b(), 90}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace oscar::testing

// Saving and restoring: the restored context continues bit for bit, in the same process, in another one, as a whole or by
// sequence; a state of another artifact is refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "llama/harness.h"
#include "llama/state_file.h"

namespace oscar::testing {
namespace {

const std::map<std::string, std::string> kSmallWindows{{"OSCAR_SINK", "16"}, {"OSCAR_RECENT", "64"}, {"OSCAR_ROLLBACK", "16"}};
constexpr std::size_t kPrompt = 256;

class State : public ::testing::Test {
 protected:
  RunResult oscar(const ModelUnderTest& model, const json& script, const std::string& artifact,
                  const std::string& mode = "oscar") const {
    return run_driver(scratch_, model, script, {.mode = mode, .artifact = artifact, .environment = kSmallWindows});
  }
  Scratch scratch_;
  json next_ = decode(part(0, 70, kPrompt, 4), 4, 1);
};

TEST_F(State, RestoredContextContinuesBitForBit) {
  for (const ModelUnderTest* model : {&smollm2(), &gemma270m()}) {
    SCOPED_TRACE(model->name);
    const std::string artifact = write_hadamard_artifact(scratch_, *model);
    for (const bool whole : {true, false}) {
      SCOPED_TRACE(whole ? "whole context" : "one sequence");
      const std::string file = scratch_.file("state");
      json save = {{"do", "save"}, {"file", file}};
      json load = {{"do", "load"}, {"file", file}};
      if (!whole) save["seq"] = load["seq"] = 0;
      const RunResult saved = oscar(*model,
                                    {context(),
                                     decode(part(0, 70, 0, kPrompt), 1, 64),
                                     decode(part(0, 70, kPrompt - 1, 0), 0),
                                     save,
                                     next_,
                                     {{"do", "clear"}},
                                     load,
                                     next_,
                                     stats_step()},
                                    artifact);
      ASSERT_EQ(saved.exit_code, 0) << saved.errors;
      ASSERT_TRUE(saved.result(6).at("ok").get<bool>());
      // Before the first graph of another process: what a prompt cache does.
      const RunResult loaded = oscar(*model, {context(), load, next_, stats_step()}, artifact);
      ASSERT_EQ(loaded.exit_code, 0) << loaded.errors;
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(same_bits(saved.row(1 + i), saved.row(5 + i)))
            << "same process, token " << i << ", KL " << kl_divergence(saved.row(1 + i), saved.row(5 + i));
        EXPECT_TRUE(same_bits(saved.row(1 + i), loaded.row(i)))
            << "new process, token " << i << ", KL " << kl_divergence(saved.row(1 + i), loaded.row(i));
      }
      EXPECT_EQ(loaded.stats().at("attention_bypassed"), 0);
    }
  }
}

TEST_F(State, StateOfAnotherArtifactIsRefused) {
  const std::string file = scratch_.file("state");
  const std::string first = write_hadamard_artifact(scratch_, smollm2(), 1);
  const std::string second = write_hadamard_artifact(scratch_, smollm2(), 2);
  const RunResult saved = oscar(smollm2(),
                                {context(),
                                 decode(part(0, 70, 0, kPrompt), 1, 64),
                                 decode(part(0, 70, kPrompt, 1), 1),
                                 {{"do", "save"}, {"seq", 0}, {"file", file}}},
                                first);
  ASSERT_EQ(saved.exit_code, 0) << saved.errors;
  ASSERT_TRUE(StateFile(file).packed(0, 100));
  const json load = {
      context(), {{"do", "load"}, {"seq", 0}, {"file", file}}, decode(part(0, 70, kPrompt + 1, 1)), stats_step()};
  const RunResult refused = oscar(smollm2(), load, second);
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_NE(refused.errors.find("artifact"), std::string::npos) << refused.errors;
  // A damaged row of the right artifact is refused, too.
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    const StateFile layout(file);
    const std::size_t rows = std::size_t{4} * 3 + 4 + 4 + layout.positions.size() * 12 + 8 + 12;  // up to the first row of K
    bytes.seekp(static_cast<std::streamoff>(rows + 100 * layout.k[0].row_bytes + 44));
    bytes.put('\x5A');
  }
  const RunResult damaged = oscar(smollm2(), load, first);
  EXPECT_EQ(damaged.exit_code, 3) << damaged.errors;
}

// A stock program's state holds plain rows: they are taken over exactly and never coded.
TEST_F(State, StateOfStockIsReadExactly) {
  const std::string file = scratch_.file("state");
  const RunResult stock =
      run_driver(scratch_, smollm2(),
                 {context(), decode(part(0, 70, 0, kPrompt), 1, 64), {{"do", "save"}, {"seq", 0}, {"file", file}}, next_},
                 {.mode = "stock"});
  ASSERT_EQ(stock.exit_code, 0) << stock.errors;
  const RunResult loaded =
      oscar(smollm2(), {context(), {{"do", "load"}, {"seq", 0}, {"file", file}}, next_, stats_step()}, "", "exact");
  ASSERT_EQ(loaded.exit_code, 0) << loaded.errors;
  for (std::size_t i = 0; i < 4; ++i) EXPECT_LT(kl_divergence(stock.row(1 + i), loaded.row(i)), 0.05);
}

}  // namespace
}  // namespace oscar::testing

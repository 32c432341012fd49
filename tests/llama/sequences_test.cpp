// Slots, chunks, copies, shifts: the cache holds the same thing however the tokens got there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "llama/harness.h"
#include "llama/state_file.h"

namespace oscar::testing {
namespace {

const std::map<std::string, std::string> kSmallWindows{{"OSCAR_SINK", "16"}, {"OSCAR_RECENT", "64"}, {"OSCAR_ROLLBACK", "16"}};

// Two runs whose inputs are equal but whose sums are taken in another order: what the model makes of the last bit. Measured
// on stock llama.cpp between chunk sizes: 0.003 .. 0.011 (SmolLM2). A wrong cell or position gives more than 1.
constexpr double kNoise = 0.05;

struct Mode {
  const char* name;
  const char* mode;
};
class Sequences : public ::testing::TestWithParam<Mode> {
 protected:
  RunResult run(const json& script) const {
    RunOptions options{.mode = GetParam().mode, .environment = kSmallWindows};
    if (options.mode == "oscar") options.artifact = write_hadamard_artifact(scratch_, smollm2());
    RunResult result = run_driver(scratch_, smollm2(), script, options);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    if (result.exit_code == 0) {
      const json stats = result.stats();
      EXPECT_EQ(stats.at("attention_bypassed"), 0);
      EXPECT_EQ(stats.at("attention_served"), stats.at("graphs").get<int>() * smollm2().n_full);
    }
    return result;
  }
  Scratch scratch_;
};

json slot_context(bool unified) {
  return context({{"n_ctx", 2048}, {"n_seq_max", 5}, {"kv_unified", unified}, {"n_ubatch", 64}});
}

// D14: four slots of different lengths, filled in turns of 64 tokens; each must answer as it does alone.
void expect_solo_answers(const std::function<RunResult(const json&)>& run, bool unified) {
  constexpr std::size_t kLengths[4] = {260, 130, 320, 70};
  json script = {slot_context(unified)};
  for (std::size_t t = 0; t < 320; t += 64) {
    for (int s = 0; s < 4; ++s) {
      if (t < kLengths[s]) {
        script.push_back(
            decode(part(s, 10 + static_cast<std::uint64_t>(s), t, std::min<std::size_t>(64, kLengths[s] - t)), 1, 64));
      }
    }
  }
  for (int s = 0; s < 4; ++s) script.push_back(decode(part(s, 10 + static_cast<std::uint64_t>(s), kLengths[s], 8), 8, 64));
  script.push_back(stats_step());
  const RunResult together = run(script);
  ASSERT_EQ(together.exit_code, 0);
  for (std::size_t s = 0; s < 4; ++s) {
    SCOPED_TRACE("slot " + std::to_string(s));
    const RunResult alone = run({slot_context(unified), decode(part(0, 10 + s, 0, kLengths[s]), 1, 64),
                                 decode(part(0, 10 + s, kLengths[s], 8), 8, 64), stats_step()});
    ASSERT_EQ(alone.exit_code, 0);
    for (std::size_t i = 0; i < 8; ++i) {
      const auto mine = together.row(together.rows() - 32 + s * 8 + i);
      const auto solo = alone.row(alone.rows() - 8 + i);
      if (unified) {
        EXPECT_LT(kl_divergence(solo, mine), kNoise) << "token " << i;  // other cells, another order of summation
      } else {
        EXPECT_TRUE(same_bits(solo, mine)) << "token " << i << ", KL " << kl_divergence(solo, mine);
      }
    }
  }
}
TEST_P(Sequences, D14FourSlotsUnified) {
  expect_solo_answers([this](const json& script) { return run(script); }, true);
}
TEST_P(Sequences, D14FourSlotsStreams) {
  expect_solo_answers([this](const json& script) { return run(script); }, false);
}

// D14: all slots in one batch, so that a batch mixes sequences; against each alone.
TEST_P(Sequences, D14MixedBatches) {
  for (const bool unified : {true, false}) {
    SCOPED_TRACE(unified ? "unified" : "streams");
    const RunResult together =
        run({slot_context(unified), decode({part(0, 20, 0, 200), part(1, 21, 0, 120), part(2, 22, 0, 160)}, 1, 64),
             decode({part(0, 20, 200, 4), part(1, 21, 120, 4), part(2, 22, 160, 4)}, 4, 64), stats_step()});
    ASSERT_EQ(together.exit_code, 0);
    constexpr std::size_t kLengths[3] = {200, 120, 160};
    for (std::size_t s = 0; s < 3; ++s) {
      const RunResult alone = run({slot_context(unified), decode(part(0, 20 + s, 0, kLengths[s]), 1, 64),
                                   decode(part(0, 20 + s, kLengths[s], 4), 4, 64), stats_step()});
      ASSERT_EQ(alone.exit_code, 0);
      for (std::size_t i = 0; i < 4; ++i) {  // rows of the last decode are interleaved token by token
        EXPECT_LT(kl_divergence(alone.row(alone.rows() - 4 + i), together.row(together.rows() - 12 + i * 3 + s)), kNoise)
            << "slot " << s;
      }
    }
  }
}

// D14: a copied sequence goes its own way, and the one it came from does not notice.
TEST_P(Sequences, D14CopyThenDiverge) {
  for (const bool unified : {true, false}) {
    SCOPED_TRACE(unified ? "unified" : "streams");
    const RunResult copied = run({slot_context(unified),
                                  decode(part(0, 30, 0, 200), 1, 64),
                                  {{"do", "cp"}, {"from", 0}, {"to", 1}},
                                  decode(part(1, 31, 200, 40), 8, 64),
                                  decode(part(0, 30, 200, 40), 8, 64),
                                  stats_step()});
    const RunResult own =
        run({slot_context(unified), decode(part(0, 30, 0, 200), 1, 64), decode(part(0, 30, 200, 40), 8, 64), stats_step()});
    const RunResult other =
        run({slot_context(unified), decode(part(0, 30, 0, 200), 1, 64), decode(part(0, 31, 200, 40), 8, 64), stats_step()});
    ASSERT_TRUE(copied.exit_code == 0 && own.exit_code == 0 && other.exit_code == 0);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_LT(kl_divergence(other.row(1 + i), copied.row(1 + i)), kNoise);
      EXPECT_LT(kl_divergence(own.row(1 + i), copied.row(9 + i)), kNoise);
    }
    EXPECT_GT(kl_divergence(own.row(1), other.row(1)), 0.2);  // the two continuations do differ
  }
}

// D4: the same prompt in chunks of 1, 7, 64 and all. Rows of the first layer do not depend on how llama.cpp cuts its own
// matrix products, so their stored bytes must be equal; deeper rows carry the noise of the layers before.
TEST_P(Sequences, D4ChunksOfAnySize) {
  constexpr std::size_t kPrompt = 300;
  std::optional<StateFile> base;
  RunResult base_run;
  for (const std::size_t chunk : {kPrompt, std::size_t{64}, std::size_t{7}, std::size_t{1}}) {
    SCOPED_TRACE("chunk " + std::to_string(chunk));
    const std::string file = scratch_.file("chunk" + std::to_string(chunk));
    // The token alone at the end closes the last policy epoch at the same position for every chunk size.
    const RunResult result = run({context({{"n_ctx", 512}}),
                                  decode(part(0, 40, 0, kPrompt), 1, chunk),
                                  decode(part(0, 40, kPrompt, 1), 1),
                                  {{"do", "save"}, {"seq", 0}, {"file", file}},
                                  stats_step()});
    ASSERT_EQ(result.exit_code, 0);
    const StateFile state(file);
    ASSERT_EQ(state.positions.size(), kPrompt + 1);
    if (!base) {
      base = state;
      base_run = result;
      const auto packed = std::count_if(state.positions.begin(), state.positions.end(),
                                        [&](int p) { return state.packed(0, static_cast<std::size_t>(p)); });
      // Everything outside sink, recent and rollback is exported as a code.
      EXPECT_EQ(packed, GetParam().mode == std::string("oscar") ? static_cast<long>(kPrompt) + 1 - 16 - 64 - 16 : 0);
      continue;
    }
    EXPECT_EQ(state.k[0].bytes, base->k[0].bytes);
    EXPECT_EQ(state.v[0].bytes, base->v[0].bytes);
    for (std::size_t i = 0; i < result.rows(); ++i) EXPECT_LT(kl_divergence(base_run.row(i), result.row(i)), kNoise);
  }
}

// D5: a removed tail is replaced; the answer is that of a context that never held it.
TEST_P(Sequences, D5RemovedTail) {
  const RunResult removed = run({context({{"n_ctx", 512}}),
                                 decode(part(0, 50, 0, 192), 1, 64),
                                 decode(part(0, 51, 192, 64), 1, 64),
                                 {{"do", "rm"}, {"p0", 192}},
                                 decode(part(0, 52, 192, 64), 8, 64),
                                 stats_step()});
  const RunResult fresh =
      run({context({{"n_ctx", 512}}), decode(part(0, 50, 0, 192), 1, 64), decode(part(0, 52, 192, 64), 8, 64), stats_step()});
  ASSERT_TRUE(removed.exit_code == 0 && fresh.exit_code == 0);
  for (std::size_t i = 0; i < 8; ++i) {
    const double kl = kl_divergence(fresh.row(fresh.rows() - 8 + i), removed.row(removed.rows() - 8 + i));
    EXPECT_LT(kl, kNoise) << i;
  }
  // 64 rows were rolled back and only 16 are promised: the missing exact rows are read as codes, and counted.
  if (GetParam().mode == std::string("oscar")) {
    EXPECT_GT(removed.stats().at("caches").at(0).at("window_misses").get<int>(), 0);
  } else {
    EXPECT_EQ(removed.stats().at("caches").at(0).at("window_misses"), 0);
  }
}

// D10: moving a whole sequence changes no relative position, so the model must answer as if it had been read there.
TEST_P(Sequences, D10ShiftEqualsPrefillAtTheNewPosition) {
  const json at_home = {{{"seq", 0}, {"seed", 60}, {"from", 0}, {"count", 256}, {"pos", 0}}};
  const json moved = {{{"seq", 0}, {"seed", 60}, {"from", 0}, {"count", 256}, {"pos", 96}}};
  const json next = {{{"seq", 0}, {"seed", 60}, {"from", 256}, {"count", 16}, {"pos", 352}}};
  const RunResult shifted = run({context({{"n_ctx", 512}}),
                                 decode(at_home, 1, 64),
                                 {{"do", "add"}, {"p0", 0}, {"p1", -1}, {"delta", 96}},
                                 decode(next, 16, 16),
                                 stats_step()});
  const RunResult there = run({context({{"n_ctx", 512}}), decode(moved, 1, 64), decode(next, 16, 16), stats_step()});
  ASSERT_TRUE(shifted.exit_code == 0 && there.exit_code == 0);
  EXPECT_EQ(shifted.stats().at("shifts"), 1);
  EXPECT_EQ(shifted.stats().at("caches").at(0).at("shifted_rows"), 256);
  double mean = 0;
  for (std::size_t i = 0; i < 16; ++i) mean += kl_divergence(there.row(1 + i), shifted.row(1 + i)) / 16;
  // Codes are decoded, rotated and coded again: a second quantisation of the same rows.
  EXPECT_LT(mean, GetParam().mode == std::string("oscar") ? 0.5 : kNoise);
}

// A context shift as programs do it: drop a piece, close the gap; exact mode against stock.
TEST(SequencesShift, D10DroppedPieceAgreesWithStock) {
  const Scratch scratch;
  const json next = {{{"seq", 0}, {"seed", 61}, {"from", 256}, {"count", 16}, {"pos", 192}}};
  const json script = {context({{"n_ctx", 512}}),
                       decode(part(0, 61, 0, 256), 1, 64),
                       {{"do", "rm"}, {"p0", 16}, {"p1", 80}},
                       {{"do", "add"}, {"p0", 80}, {"p1", -1}, {"delta", -64}},
                       decode(next, 16, 16),
                       stats_step()};
  const RunResult stock = run_driver(scratch, smollm2(), script, {.mode = "stock"});
  const RunResult exact = run_driver(scratch, smollm2(), script, {.mode = "exact"});
  ASSERT_EQ(exact.exit_code, 0) << exact.errors;
  EXPECT_EQ(exact.stats().at("shifts"), 1);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_LT(kl_divergence(stock.row(1 + i), exact.row(1 + i)), kNoise);
}

INSTANTIATE_TEST_SUITE_P(Modes, Sequences, ::testing::Values(Mode{"exact", "exact"}, Mode{"oscar", "oscar"}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace oscar::testing

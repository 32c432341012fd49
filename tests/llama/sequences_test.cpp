// Slots, chunks, copies, shifts: the cache holds the same thing however the tokens got there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llama/harness.h"
#include "llama/state_file.h"

namespace oscar::testing {
namespace {

const std::map<std::string, std::string> kSmallWindows{{"OSCAR_SINK", "16"}, {"OSCAR_RECENT", "64"}, {"OSCAR_ROLLBACK", "16"}};

// Two runs whose inputs are equal but whose sums are taken in another order: what the model makes of the last bit, as a mean
// KL divergence over the compared tokens. Measured on stock llama.cpp between chunk sizes: 0.003 .. 0.011 (SmolLM2). Coded rows
// amplify it, because a coordinate on the edge between two codes jumps by a whole step: 0.01 .. 0.12. The strict test of the
// cache is therefore that rows of the first layer, which nothing precedes, are equal bit for bit; tokens of another sequence,
// for comparison, are further away than kUnrelated.
constexpr double kExactNoise = 0.05;
constexpr double kCodedNoise = 0.4;
constexpr double kUnrelated = 1.0;

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
      for (const json& cache : stats.at("caches")) misses_ += cache.at("window_misses").get<int>();
    }
    return result;
  }
  [[nodiscard]] bool coded() const { return GetParam().mode == std::string("oscar"); }
  [[nodiscard]] double noise() const { return coded() ? kCodedNoise : kExactNoise; }
  void TearDown() override { EXPECT_EQ(misses_, expected_misses_); }

  mutable int misses_ = 0;
  int expected_misses_ = 0;
  Scratch scratch_;
};

json save(int seq, const std::string& file) { return {{"do", "save"}, {"seq", seq}, {"file", file}}; }

// Rows of the first layer of two saved sequences: same positions, same bytes.
void expect_same_first_layer(const std::string& a, const std::string& b) {
  const auto rows = [](const StateFile& state) {
    std::map<int, std::pair<std::vector<std::uint8_t>, std::vector<std::uint8_t>>> list;
    for (std::size_t i = 0; i < state.positions.size(); ++i) list[state.positions[i]] = {state.k[0].row(i), state.v[0].row(i)};
    return list;
  };
  const auto left = rows(StateFile(a));
  EXPECT_GT(left.size(), 0U);
  EXPECT_TRUE(left == rows(StateFile(b)));
}

json slot_context(bool unified) {
  return context({{"n_ctx", 2048}, {"n_seq_max", 5}, {"kv_unified", unified}, {"n_ubatch", 64}});
}

// D14: four slots of different lengths, filled in turns of 64 tokens or all in the same batches; each must answer as it does
// alone.
TEST_P(Sequences, D14FourSlots) {
  constexpr std::size_t kLengths[4] = {200, 100, 240, 70};
  constexpr std::size_t kNext = 6;
  const auto seed = [](std::size_t slot) { return std::uint64_t{10} + slot; };
  for (const bool unified : {true, false}) {
    SCOPED_TRACE(unified ? "unified" : "streams");
    json turns = json::array({slot_context(unified)});
    json mixed = turns;
    for (std::size_t t = 0; t < 240; t += 64) {
      for (std::size_t s = 0; s < 4; ++s) {
        if (t < kLengths[s])
          turns.push_back(decode(part(static_cast<int>(s), seed(s), t, std::min<std::size_t>(64, kLengths[s] - t)), 1, 64));
      }
    }
    json all = json::array();
    json next = json::array();
    for (std::size_t s = 0; s < 4; ++s) {
      all.push_back(part(static_cast<int>(s), seed(s), 0, kLengths[s]));
      next.push_back(part(static_cast<int>(s), seed(s), kLengths[s], kNext));
      turns.push_back(decode(part(static_cast<int>(s), seed(s), kLengths[s], kNext), kNext, 64));
    }
    mixed.push_back(decode(all, 1, 64));
    mixed.push_back(decode(next, kNext, 64));
    for (std::size_t s = 0; s < 4; ++s) {
      turns.push_back(save(static_cast<int>(s), scratch_.file("turns" + std::to_string(s))));
      mixed.push_back(save(static_cast<int>(s), scratch_.file("mixed" + std::to_string(s))));
    }
    turns.push_back(stats_step());
    mixed.push_back(stats_step());
    const RunResult in_turns = run(turns);
    const RunResult in_mixed = run(mixed);
    ASSERT_TRUE(in_turns.exit_code == 0 && in_mixed.exit_code == 0);
    for (std::size_t s = 0; s < 4; ++s) {
      SCOPED_TRACE("slot " + std::to_string(s));
      const RunResult alone =
          run({slot_context(unified), decode(part(0, seed(s), 0, kLengths[s]), 1, 64),
               decode(part(0, seed(s), kLengths[s], kNext), kNext, 64), save(0, scratch_.file("alone")), stats_step()});
      ASSERT_EQ(alone.exit_code, 0);
      double turns_kl = 0, mixed_kl = 0, other_kl = 0;
      bool same = true;
      for (std::size_t i = 0; i < kNext; ++i) {
        const auto solo = alone.row(alone.rows() - kNext + i);
        const auto turn = in_turns.row(in_turns.rows() - 4 * kNext + s * kNext + i);
        same = same && same_bits(solo, turn);
        turns_kl += kl_divergence(solo, turn) / kNext;
        // Rows of a mixed batch are interleaved token by token.
        mixed_kl += kl_divergence(solo, in_mixed.row(in_mixed.rows() - 4 * kNext + i * 4 + s)) / kNext;
        other_kl += kl_divergence(solo, in_mixed.row(in_mixed.rows() - 4 * kNext + i * 4 + (s + 1) % 4)) / kNext;
      }
      // Streams of their own: the same cells in the same order as alone, so the very same sums.
      if (!unified) {
        EXPECT_TRUE(same) << "mean KL " << turns_kl;
      }
      EXPECT_LT(turns_kl, noise());
      EXPECT_LT(mixed_kl, noise());
      EXPECT_GT(other_kl, kUnrelated);
      expect_same_first_layer(scratch_.file("alone"), scratch_.file("turns" + std::to_string(s)));
      expect_same_first_layer(scratch_.file("alone"), scratch_.file("mixed" + std::to_string(s)));
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
    // Masks do not show a copy before its first token: meanwhile the other sequence may let go of rows that the late one wants
    // exact. They are read as codes and counted, and the results below stay within the noise.
    expected_misses_ = misses_;
    EXPECT_EQ(misses_ > 0, coded());
    const RunResult own =
        run({slot_context(unified), decode(part(0, 30, 0, 200), 1, 64), decode(part(0, 30, 200, 40), 8, 64), stats_step()});
    const RunResult other =
        run({slot_context(unified), decode(part(0, 30, 0, 200), 1, 64), decode(part(0, 31, 200, 40), 8, 64), stats_step()});
    ASSERT_TRUE(copied.exit_code == 0 && own.exit_code == 0 && other.exit_code == 0);
    double other_kl = 0, own_kl = 0, apart = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      other_kl += kl_divergence(other.row(1 + i), copied.row(1 + i)) / 8;
      own_kl += kl_divergence(own.row(1 + i), copied.row(9 + i)) / 8;
      apart += kl_divergence(own.row(1 + i), other.row(1 + i)) / 8;
    }
    EXPECT_LT(other_kl, noise());
    EXPECT_LT(own_kl, noise());
    EXPECT_GT(apart, kUnrelated);  // the two continuations do differ
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
      EXPECT_EQ(packed, coded() ? static_cast<long>(kPrompt) + 1 - 16 - 64 - 16 : 0);
      continue;
    }
    EXPECT_EQ(state.k[0].bytes, base->k[0].bytes);
    EXPECT_EQ(state.v[0].bytes, base->v[0].bytes);
    EXPECT_LT((kl_divergence(base_run.row(0), result.row(0)) + kl_divergence(base_run.row(1), result.row(1))) / 2, noise());
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
  double kl = 0;
  for (std::size_t i = 0; i < 8; ++i)
    kl += kl_divergence(fresh.row(fresh.rows() - 8 + i), removed.row(removed.rows() - 8 + i)) / 8;
  EXPECT_LT(kl, coded() ? kUnrelated : noise());  // coded: some rows of the window are read as codes, see below
  // 64 rows were rolled back and only 16 are promised: the missing exact rows are read as codes, and counted.
  if (coded()) {
    EXPECT_GT(misses_, 0);
    expected_misses_ = misses_;
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
  EXPECT_LT(mean, coded() ? kUnrelated : noise());
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
  for (std::size_t i = 0; i < 16; ++i) EXPECT_LT(kl_divergence(stock.row(1 + i), exact.row(1 + i)), kExactNoise);
}

INSTANTIATE_TEST_SUITE_P(Modes, Sequences, ::testing::Values(Mode{"exact", "exact"}, Mode{"oscar", "oscar"}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace oscar::testing

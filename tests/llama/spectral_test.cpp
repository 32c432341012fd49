// The spectral codec inside llama.cpp: everything is served within the reference, rows cost what they should, states and shifts
// work as they do for int2.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "llama/harness.h"
#include "llama/state_file.h"

namespace oscar::testing {
namespace {

// Windows small enough that a short prompt has coded rows in every layer.
const std::map<std::string, std::string> kSpectral{
    {"OSCAR_CODEC", "spectral"}, {"OSCAR_SINK", "16"}, {"OSCAR_RECENT", "64"}, {"OSCAR_ROLLBACK", "16"}};

class Spectral : public ::testing::Test {
 protected:
  RunResult spectral(const ModelUnderTest& model, const json& script, const std::string& artifact,
                     const std::map<std::string, std::string>& more = {}) const {
    std::map<std::string, std::string> environment = kSpectral;
    for (const auto& [key, value] : more) environment[key] = value;
    return run_driver(scratch_, model, script, {.mode = "oscar", .artifact = artifact, .environment = environment});
  }
  Scratch scratch_;
};

// Our attention on coded rows against double precision on decoded ones, operation by operation, while the model runs.
TEST_F(Spectral, ServesEverythingWithinTheReference) {
  struct Case {
    const ModelUnderTest* model;
    std::size_t prompt;
    const char* k_bits;
    const char* v_bits;
    const char* arithmetic = "float";
  };
  for (const Case& c : {Case{&smollm2(), 200, "2", "2"}, Case{&smollm2(), 130, "1.5", "3"}, Case{&smollm2(), 130, "2.5", "2.5"},
                        Case{&gemma270m(), 200, "2", "2"}, Case{&smollm2(), 200, "2", "2", "integer"},
                        Case{&smollm2(), 130, "1.5", "3", "integer"}, Case{&gemma270m(), 200, "2.5", "1.5", "integer"}}) {
    SCOPED_TRACE(c.model->name + " K " + c.k_bits + " V " + c.v_bits + " " + c.arithmetic);
    const bool integer = c.arithmetic == std::string_view("integer");
    const json script = {context({{"n_ctx", 512}, {"swa_full", false}}), decode(part(0, 1, 0, c.prompt), 1, 128),
                         decode(part(0, 1, c.prompt, 3), 3, 1), decode(part(0, 1, c.prompt + 3, 40), 40, 64), stats_step()};
    const RunResult run = spectral(
        *c.model, script, fitted_artifact(*c.model),
        {{"OSCAR_CHECK", "1"}, {"OSCAR_ARITHMETIC", c.arithmetic}, {"OSCAR_K_BITS", c.k_bits}, {"OSCAR_V_BITS", c.v_bits}});
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_NE(run.errors.find(std::string("spectral, K ") + c.k_bits + " bits V " + c.v_bits + " bits"), std::string::npos)
        << run.errors;
    const json stats = run.stats();
    EXPECT_EQ(stats.at("attention_served"), stats.at("graphs").get<int>() * c.model->n_full);
    EXPECT_EQ(stats.at("attention_bypassed"), 0);
    EXPECT_TRUE(stats.at("refused").is_null()) << stats.at("refused");
    EXPECT_GT(stats.at("checked_rows").get<std::int64_t>(), 0);
    // Integers: the worst head of all operations; below, nothing was compared or no integers were used.
    EXPECT_LE(stats.at("worst_relative_error").get<double>(), integer ? 0.15 : 2e-5);
    EXPECT_GT(stats.at("worst_relative_error").get<double>(), integer ? 1e-4 : 0.0);
    for (const float x : run.logits) ASSERT_TRUE(std::isfinite(x));
    const double bits = (std::stod(c.k_bits) + std::stod(c.v_bits)) / 2 + 8.0 / c.model->head_dim;
    const json& caches = stats.at("caches");
    const auto coded =
        std::find_if(caches.begin(), caches.end(), [](const json& x) { return !x.at("sliding_window").get<bool>(); });
    ASSERT_NE(coded, caches.end());
    EXPECT_NEAR(coded->at("bits_per_element").get<double>(), bits, 1e-9);
    EXPECT_GT(coded->at("code_bytes").get<std::int64_t>(), 0);
  }
}

// Layers with rates of their own: the configuration line says it, and the bits are those of all layers together.
TEST_F(Spectral, LayersHaveTheirOwnRates) {
  const json script = {context({{"n_ctx", 512}}), decode(part(0, 1, 0, 200), 1, 128), stats_step()};
  const std::string artifact = fitted_artifact(smollm2());
  const RunResult run =
      spectral(smollm2(), script, artifact,
               {{"OSCAR_CHECK", "1"}, {"OSCAR_ARITHMETIC", "float"}, {"OSCAR_LAYER_BITS", "0:3,1:3/2.5,5-7:k3"}});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_NE(run.errors.find("spectral, K 2 bits V 2 bits, by layer 0:3,1:3/2.5,5-7:k3 |"), std::string::npos) << run.errors;
  EXPECT_LE(run.stats().at("worst_relative_error").get<double>(), 2e-5);
  // A rate is that of all layers together: what single layers have of it differs.
  EXPECT_NEAR(run.stats().at("caches").at(0).at("bits_per_element").get<double>(), 2.125 + (1 + 0.75 + 3 * 0.5) / 30, 0.03);
  for (const auto& [value, fragment] :
       {std::pair("0:7", "gives '7' bits"), std::pair("30:3", "names layer 30, which this model does not have")}) {
    const RunResult refused = spectral(smollm2(), script, artifact, {{"OSCAR_LAYER_BITS", value}});
    EXPECT_EQ(refused.exit_code, 3) << refused.errors;
    EXPECT_NE(refused.errors.find(fragment), std::string::npos) << refused.errors;
  }
}

TEST_F(Spectral, TheArtifactMustHoldIt) {
  const json script = {context({{"n_ctx", 512}}), decode(part(0, 1, 0, 100), 1), stats_step()};
  const RunResult run = spectral(smollm2(), script, write_hadamard_artifact(scratch_, smollm2()));
  EXPECT_NE(run.exit_code, 0);
  EXPECT_NE(run.errors.find("the artifact has no spectral codec"), std::string::npos) << run.errors;
}

TEST_F(Spectral, RestoredContextContinuesBitForBit) {
  constexpr std::size_t kPrompt = 256;
  const std::string artifact = fitted_artifact(smollm2());
  const json next = decode(part(0, 70, kPrompt, 4), 4, 1);
  for (const bool whole : {true, false}) {
    SCOPED_TRACE(whole ? "whole context" : "one sequence");
    const std::string file = scratch_.file("state");
    json save = {{"do", "save"}, {"file", file}};
    json load = {{"do", "load"}, {"file", file}};
    if (!whole) save["seq"] = load["seq"] = 0;
    const RunResult saved = spectral(
        smollm2(), {context(), decode(part(0, 70, 0, kPrompt), 1, 64), save, next, {{"do", "clear"}}, load, next, stats_step()},
        artifact);
    ASSERT_EQ(saved.exit_code, 0) << saved.errors;
    ASSERT_TRUE(saved.result(5).at("ok").get<bool>());
    const RunResult loaded = spectral(smollm2(), {context(), load, next, stats_step()}, artifact);
    ASSERT_EQ(loaded.exit_code, 0) << loaded.errors;
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(same_bits(saved.row(1 + i), saved.row(5 + i))) << "same process, token " << i;
      EXPECT_TRUE(same_bits(saved.row(1 + i), loaded.row(i))) << "new process, token " << i;
    }
    if (whole) continue;
    EXPECT_TRUE(StateFile(file).packed(0, 100));
    // The same artifact, but codes of another kind.
    for (const auto& [key, value] :
         {std::pair("OSCAR_CODEC", "int2"), std::pair("OSCAR_K_BITS", "2.5"), std::pair("OSCAR_LAYER_BITS", "29:v3")}) {
      const RunResult refused = spectral(smollm2(), {context(), load, next, stats_step()}, artifact, {{key, value}});
      EXPECT_EQ(refused.exit_code, 3) << refused.errors;
      EXPECT_NE(refused.errors.find("artifact"), std::string::npos) << refused.errors;
    }
  }
}

// Rows of the first layer, which nothing precedes, do not depend on how the prompt was cut; and the codes are all there.
TEST_F(Spectral, D4ChunksOfAnySize) {
  constexpr std::size_t kPrompt = 200;
  const std::string artifact = fitted_artifact(smollm2());
  std::vector<StateFile> states;
  for (const std::size_t chunk : {kPrompt, std::size_t{64}, std::size_t{7}}) {
    const std::string file = scratch_.file("chunk" + std::to_string(chunk));
    // The token alone at the end closes the last policy epoch at the same position for every chunk size.
    const RunResult run = spectral(smollm2(),
                                   {context({{"n_ctx", 512}}),
                                    decode(part(0, 40, 0, kPrompt), 1, chunk),
                                    decode(part(0, 40, kPrompt, 1), 1),
                                    {{"do", "save"}, {"seq", 0}, {"file", file}},
                                    stats_step()},
                                   artifact);
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    states.emplace_back(file);
    const StateFile& state = states.back();
    ASSERT_EQ(state.positions.size(), kPrompt + 1);
    const auto packed = std::count_if(state.positions.begin(), state.positions.end(),
                                      [&](int p) { return state.packed(0, static_cast<std::size_t>(p)); });
    EXPECT_EQ(packed, static_cast<long>(kPrompt) + 1 - 16 - 64 - 16);
    EXPECT_EQ(state.k[0].bytes, states.front().k[0].bytes) << chunk;
    EXPECT_EQ(state.v[0].bytes, states.front().v[0].bytes) << chunk;
  }
}

// D10: moving a whole sequence changes no relative position, so the model must answer as if it had been read there. Codes are
// decoded, rotated and coded again; tokens of another text are further away.
TEST_F(Spectral, D10ShiftEqualsPrefillAtTheNewPosition) {
  const std::string artifact = fitted_artifact(smollm2());
  const auto read = [](std::uint64_t seed, int pos) {
    return json::array({{{"seq", 0}, {"seed", seed}, {"from", 0}, {"count", 256}, {"pos", pos}}});
  };
  const json next = {{{"seq", 0}, {"seed", 60}, {"from", 256}, {"count", 16}, {"pos", 352}}};
  const json ctx = context({{"n_ctx", 512}});
  const RunResult shifted = spectral(smollm2(),
                                     {ctx,
                                      decode(read(60, 0), 1, 64),
                                      {{"do", "add"}, {"p0", 0}, {"p1", -1}, {"delta", 96}},
                                      decode(next, 16, 16),
                                      stats_step()},
                                     artifact);
  const RunResult there = spectral(smollm2(), {ctx, decode(read(60, 96), 1, 64), decode(next, 16, 16), stats_step()}, artifact);
  const RunResult other = spectral(smollm2(), {ctx, decode(read(61, 96), 1, 64), decode(next, 16, 16), stats_step()}, artifact);
  ASSERT_EQ(shifted.exit_code, 0) << shifted.errors;
  ASSERT_TRUE(there.exit_code == 0 && other.exit_code == 0);
  EXPECT_EQ(shifted.stats().at("shifts"), 1);
  EXPECT_EQ(shifted.stats().at("caches").at(0).at("shifted_rows"), 256);
  EXPECT_EQ(shifted.stats().at("attention_bypassed"), 0);
  double moved = 0;
  double apart = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    moved += kl_divergence(there.row(1 + i), shifted.row(1 + i)) / 16;
    apart += kl_divergence(there.row(1 + i), other.row(1 + i)) / 16;
  }
  EXPECT_LT(moved, 1.0);
  EXPECT_GT(apart, moved);
}

}  // namespace
}  // namespace oscar::testing

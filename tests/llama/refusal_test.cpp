// What cannot be served is said, and fatal in strict mode; otherwise the program runs stock, bit for bit.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "llama/harness.h"
#include "oscar/artifact/artifact.h"
#include "oscar/method/rotation.h"

namespace oscar::testing {
namespace {

class Refusal : public ::testing::Test {
 protected:
  // Strict: exit code 3 and a sentence with `word`. Lenient: stock's logits, and the bypass is counted.
  void expect_refused(const json& settings, const std::string& word) const {
    const std::string artifact = write_hadamard_artifact(scratch_, smollm2());
    json fields = {{"n_ctx", 512}};
    fields.update(settings);
    const json script = {context(fields), decode(part(0, 1, 0, 100), 2), decode(part(0, 1, 100, 2), 2, 1), stats_step()};
    const RunResult strict = run_driver(scratch_, smollm2(), script, {.mode = "oscar", .artifact = artifact});
    EXPECT_EQ(strict.exit_code, 3) << strict.errors;
    EXPECT_NE(strict.errors.find(word), std::string::npos) << strict.errors;
    const RunResult stock = run_driver(scratch_, smollm2(), script, {.mode = "stock"});
    ASSERT_EQ(stock.exit_code, 0) << stock.errors;
    const RunResult lenient = run_driver(scratch_, smollm2(), script,
                                         {.mode = "oscar", .artifact = artifact, .environment = {{"OSCAR_STRICT", "0"}}});
    ASSERT_EQ(lenient.exit_code, 0) << lenient.errors;
    EXPECT_NE(lenient.errors.find(word), std::string::npos) << lenient.errors;
    EXPECT_TRUE(same_bits(stock.logits, lenient.logits));
    EXPECT_EQ(lenient.stats().at("attention_served"), 0);
    EXPECT_EQ(lenient.stats().at("attention_bypassed"), 3 * 30);
    EXPECT_TRUE(lenient.stats().at("refused").is_string());
  }
  Scratch scratch_;
};

TEST_F(Refusal, QuantisedCacheTypes) { expect_refused({{"type_k", "q8_0"}, {"type_v", "q8_0"}}, "q8_0"); }
TEST_F(Refusal, OtherFloatTypes) { expect_refused({{"type_k", "bf16"}, {"type_v", "bf16"}}, "bf16"); }
TEST_F(Refusal, FlashAttentionOff) { expect_refused({{"flash_attn", "off"}}, "flash"); }

TEST_F(Refusal, NoArtifact) {
  const json script = {context({{"n_ctx", 512}}), decode(part(0, 1, 0, 20))};
  const RunResult run =
      run_driver(scratch_, smollm2(), script, {.mode = "oscar", .artifact = scratch_.file("missing.safetensors")});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.errors.find("missing.safetensors"), std::string::npos) << run.errors;
}

// Artifacts that must not be used: the program ends with a sentence that names what does not fit.
class UnfitArtifact : public ::testing::Test {
 protected:
  void expect_refused(const std::string& artifact, const std::string& sentence, const json& fields = json::object(),
                      const std::map<std::string, std::string>& environment = {}) const {
    json settings = {{"n_ctx", 512}};
    settings.update(fields);
    const json script = {context(settings), decode(part(0, 1, 0, 20))};
    const RunResult run =
        run_driver(scratch_, smollm2(), script, {.mode = "oscar", .artifact = artifact, .environment = environment});
    EXPECT_EQ(run.exit_code, 3) << run.errors;
    EXPECT_NE(run.errors.find(sentence), std::string::npos) << run.errors;
  }
  Scratch scratch_;
};

TEST_F(UnfitArtifact, OfAnotherModel) {
  expect_refused(write_hadamard_artifact(scratch_, qwen05b()), "was made for another model");
}

// As large a row as the model's, cut into other heads.
TEST_F(UnfitArtifact, OfOtherHeads) {
  const std::string path = write_hadamard_artifact(scratch_, smollm2());
  Artifact artifact = load_artifact(path);
  for (LayerArtifact& layer : artifact.layers) {
    layer.shape.n_head = 2 * layer.shape.n_head;
    layer.shape.n_head_kv = 2 * layer.shape.n_head_kv;
    layer.shape.k_dim = layer.shape.v_dim = 32;
    layer.k_rotation = layer.v_rotation = {hadamard(32).cast<float>()};
  }
  save_artifact(artifact, path);
  expect_refused(path, "is for 6 KV heads of 32, the layer has 3 of 64");
}

TEST_F(UnfitArtifact, OfOtherRope) {
  const std::map<std::string, std::string> spectral = {{"OSCAR_CODEC", "spectral"}};
  expect_refused(fitted_artifact(smollm2()), "the artifact's key mean was made for another RoPE", {{"rope_freq_base", 5000.0}},
                 spectral);
}

TEST_F(UnfitArtifact, Damaged) {
  const std::string path = write_hadamard_artifact(scratch_, smollm2());
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put('x');
  file.close();
  expect_refused(path, "it is damaged");
}

// What older versions wrote holds no spectral codec: it still serves int2, and says what to do when the other is asked for.
TEST_F(UnfitArtifact, WithoutTheCodecAskedFor) {
  expect_refused(write_hadamard_artifact(scratch_, smollm2()), "calibrate again", json::object(),
                 {{"OSCAR_CODEC", "spectral"}});
}

TEST_F(Refusal, WrongSettingIsNamed) {
  const json script = {context({{"n_ctx", 512}}), decode(part(0, 1, 0, 20))};
  const RunResult run = run_driver(scratch_, smollm2(), script, {.mode = "exact", .environment = {{"OSCAR_RECENT", "many"}}});
  EXPECT_EQ(run.exit_code, 3) << run.errors;
  EXPECT_NE(run.errors.find("OSCAR_RECENT"), std::string::npos) << run.errors;
}

// A host with a ggml the plug-in was not built for: refused before anything is touched, both versions named.
TEST_F(Refusal, UnknownGgmlVersion) {
  const std::string output = scratch_.file("output");
  const int status = std::system(fmt::format("'{}' '{}' >'{}' 2>&1", OSCAR_TEST_FAKE_HOST, OSCAR_TEST_PLUGIN, output).c_str());
  std::ifstream file(output);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(WEXITSTATUS(status), 0) << text;
  EXPECT_NE(text.find("9.9.9"), std::string::npos) << text;
  EXPECT_NE(text.find(OSCAR_TEST_GGML_VERSION), std::string::npos) << text;
  EXPECT_NE(text.find("registration: none"), std::string::npos) << text;
}

}  // namespace
}  // namespace oscar::testing

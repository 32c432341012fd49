// What cannot be served is said, and fatal in strict mode; otherwise the program runs stock, bit for bit.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "llama/harness.h"

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

TEST_F(Refusal, ArtifactOfAnotherModel) {
  const json script = {context({{"n_ctx", 512}}), decode(part(0, 1, 0, 20))};
  const RunResult run =
      run_driver(scratch_, smollm2(), script, {.mode = "oscar", .artifact = write_hadamard_artifact(scratch_, qwen05b())});
  EXPECT_EQ(run.exit_code, 3) << run.errors;
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

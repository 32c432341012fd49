// Runs the driver as a child process, once per plug-in mode, and compares what the runs computed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace oscar::testing {

using nlohmann::json;

struct ModelUnderTest {
  std::string name;             // smollm2, qwen0.5b, qwen1.5b, gemma270m
  int n_layer = 0, n_full = 0;  // all layers, and those with full attention
  int n_head_kv = 0, head_dim = 0;
  [[nodiscard]] std::filesystem::path path() const;  // Error naming the file and how to get it when it is missing
};
const ModelUnderTest& smollm2();
const ModelUnderTest& qwen05b();
const ModelUnderTest& qwen15b();
const ModelUnderTest& gemma270m();

// Lives as long as the test: every file of a run goes there.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return (directory_ / name).string(); }

 private:
  std::filesystem::path directory_;
};

struct RunOptions {
  std::string mode = "stock";                        // stock: the plug-in is not loaded
  std::string artifact{};                            // empty: none given
  std::map<std::string, std::string> environment{};  // added to the child's; OSCAR_STRICT=1 unless given here
  std::string plugin{};                              // empty: the one just built
  int threads = 0;                                   // 0: OSCAR_TEST_THREADS, or 2
};

struct RunResult {
  int exit_code = -1;
  std::string errors;  // stderr
  json output;         // the driver's object; null when it did not end well
  int n_vocab = 0;
  std::vector<float> logits;
  [[nodiscard]] std::size_t rows() const { return n_vocab == 0 ? 0 : logits.size() / static_cast<std::size_t>(n_vocab); }
  [[nodiscard]] std::span<const float> row(std::size_t i) const {
    return std::span(logits).subspan(i * static_cast<std::size_t>(n_vocab), static_cast<std::size_t>(n_vocab));
  }
  [[nodiscard]] const json& result(std::size_t step) const { return output.at("results").at(step); }
  [[nodiscard]] json stats() const;  // of the last "stats" step
};

RunResult run_driver(const Scratch& scratch, const ModelUnderTest& model, const json& script, const RunOptions& options);

// Steps of a script, see driver.cpp.
json context(const json& fields = json::object());
json decode(const json& parts, std::size_t logits = 1, std::size_t chunk = 512);
json part(int seq, std::uint64_t seed, std::size_t from, std::size_t count);
json stats_step();
json memory_step();

// An artifact that needs no calibration (Hadamard rotations with random signs by `seed`, no means), for tests of the machinery.
std::string write_hadamard_artifact(const Scratch& scratch, const ModelUnderTest& model, std::uint64_t seed = 1);

// An artifact fitted on a few hundred tokens of the model's own activations, with both codecs; made once per process. Its
// recipe asks for int2, as OSCAR_CODEC=spectral may be set on any artifact that holds the other.
std::string fitted_artifact(const ModelUnderTest& model);

// Distances between rows of logits.
double kl_divergence(std::span<const float> base, std::span<const float> other);  // nats
double max_difference(std::span<const float> a, std::span<const float> b);
bool same_bits(std::span<const float> a, std::span<const float> b);

}  // namespace oscar::testing

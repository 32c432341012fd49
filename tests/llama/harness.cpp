#include "llama/harness.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "oscar/artifact/artifact.h"
#include "oscar/base/error.h"
#include "oscar/io/gguf.h"
#include "oscar/method/rotation.h"

extern char** environ;

namespace oscar::testing {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int default_threads() {
  const char* text = std::getenv("OSCAR_TEST_THREADS");
  return text == nullptr ? 2 : std::stoi(text);
}

// Runs argv with stdin, stdout and stderr in files; the exit code, or 128 + signal as a shell would report it.
int run_process(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& additions,
                const std::string& in, const std::string& out, const std::string& err) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    // The caller's own OSCAR settings must not change what a test means; where models and the cache live may.
    if (text.rfind("OSCAR_", 0) != 0 || text.rfind("OSCAR_TEST_", 0) == 0 || text.rfind("OSCAR_CACHE_DIR=", 0) == 0)
      environment.push_back(text);
  }
  for (const auto& [key, value] : additions) environment.push_back(key + "=" + value);
  std::vector<char*> argv, envp;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  for (const std::string& e : environment) envp.push_back(const_cast<char*>(e.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    const int fd_in = open(in.c_str(), O_RDONLY);
    const int fd_out = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int fd_err = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd_in < 0 || fd_out < 0 || fd_err < 0 || dup2(fd_in, 0) < 0 || dup2(fd_out, 1) < 0 || dup2(fd_err, 2) < 0) _exit(126);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::filesystem::path ModelUnderTest::path() const {
  const char* directory = std::getenv("OSCAR_TEST_MODEL_DIR");
  const std::filesystem::path file =
      (directory != nullptr ? std::filesystem::path(directory) : cache_dir() / "models") / (name + ".gguf");
  if (!std::filesystem::exists(file))
    fail("the tests need {}; `make test` downloads it, OSCAR_TEST_MODEL_DIR names another folder", file.string());
  return file;
}

const ModelUnderTest& smollm2() {
  static const ModelUnderTest model{"smollm2", 30, 30, 3, 64};
  return model;
}
const ModelUnderTest& qwen05b() {
  static const ModelUnderTest model{"qwen0.5b", 24, 24, 2, 64};
  return model;
}
const ModelUnderTest& qwen15b() {
  static const ModelUnderTest model{"qwen1.5b", 28, 28, 2, 128};
  return model;
}
const ModelUnderTest& gemma270m() {
  static const ModelUnderTest model{"gemma270m", 18, 3, 1, 256};
  return model;
}

Scratch::Scratch() {
  static std::atomic<int> counter{0};
  directory_ = std::filesystem::temp_directory_path() / fmt::format("oscar-llama-test-{}-{}", getpid(), counter.fetch_add(1));
  std::filesystem::create_directories(directory_);
}

Scratch::~Scratch() {
  std::error_code ignored;  // a destructor must not throw; a leftover temporary folder harms nobody
  std::filesystem::remove_all(directory_, ignored);
}

json RunResult::stats() const {
  const json& results = output.at("results");
  for (auto it = results.rbegin(); it != results.rend(); ++it) {
    if (it->contains("stats")) return it->at("stats");
  }
  throw std::runtime_error("the script has no stats step");
}

RunResult run_driver(const Scratch& scratch, const ModelUnderTest& model, const json& script, const RunOptions& options) {
  static std::atomic<int> counter{0};
  const std::string stem = scratch.file(fmt::format("run{}", counter.fetch_add(1)));
  std::ofstream(stem + ".json") << script.dump(1);
  std::vector<std::string> arguments{OSCAR_TEST_DRIVER,
                                     "--model",
                                     model.path().string(),
                                     "--logits",
                                     stem + ".logits",
                                     "--threads",
                                     std::to_string(options.threads > 0 ? options.threads : default_threads())};
  std::map<std::string, std::string> environment{{"OSCAR_STRICT", "1"}};
  if (options.mode != "stock") {
    arguments.insert(arguments.end(), {"--plugin", options.plugin.empty() ? OSCAR_TEST_PLUGIN : options.plugin});
    environment["OSCAR_MODE"] = options.mode;
  }
  if (!options.artifact.empty()) environment["OSCAR_ARTIFACT"] = options.artifact;
  for (const auto& [key, value] : options.environment) environment[key] = value;

  RunResult result;
  result.exit_code = run_process(arguments, environment, stem + ".json", stem + ".out", stem + ".err");
  result.errors = read_text(stem + ".err");
  if (result.exit_code != 0) return result;
  result.output = json::parse(read_text(stem + ".out"));
  result.n_vocab = result.output.at("n_vocab");
  const std::string bytes = read_text(stem + ".logits");
  result.logits.resize(bytes.size() / sizeof(float));
  std::memcpy(result.logits.data(), bytes.data(), result.logits.size() * sizeof(float));
  if (result.rows() != result.output.at("rows").get<std::size_t>()) throw std::runtime_error("the logits file is not complete");
  return result;
}

json context(const json& fields) {
  json step = {{"do", "context"}};
  step.update(fields);
  return step;
}

json decode(const json& parts, std::size_t logits, std::size_t chunk) {
  return {{"do", "decode"}, {"parts", parts.is_array() ? parts : json::array({parts})}, {"logits", logits}, {"chunk", chunk}};
}

json part(int seq, std::uint64_t seed, std::size_t from, std::size_t count) {
  return {{"seq", seq}, {"seed", seed}, {"from", from}, {"count", count}};
}

json stats_step() { return {{"do", "stats"}}; }
json memory_step() { return {{"do", "memory"}}; }

std::string write_hadamard_artifact(const Scratch& scratch, const ModelUnderTest& model, std::uint64_t seed) {
  const GgufModel description = describe_model(Gguf(model.path()));
  Artifact artifact;
  artifact.model = {description.fingerprint, description.architecture, description.name, description.n_layer};
  artifact.recipe.k_mean = MeanMode::none;
  artifact.recipe.v_mean = MeanMode::none;
  artifact.recipe.k_objective = artifact.recipe.v_objective = "hadamard_plain";
  artifact.recipe.per_head = false;
  artifact.provenance = {{"sources", json::array()}, {"tokens", 0}};
  artifact.date = "2026-01-01";
  std::uint64_t state = seed;
  const auto signed_hadamard = [&state](int dim) {
    MatrixF rotation = hadamard(dim).cast<float>();
    for (int column = 0; column < dim; ++column) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      if ((state >> 63) != 0) rotation.col(column) *= -1.0F;
    }
    return rotation;
  };
  for (const LayerShape& shape : description.layers) {
    LayerArtifact layer;
    layer.shape = shape;
    if (!shape.sliding_window) {
      layer.k_rotation = {signed_hadamard(shape.k_dim)};
      layer.v_rotation = {signed_hadamard(shape.v_dim)};
      layer.clip_k = {0.96F};
      layer.clip_v = {0.92F};
    }
    artifact.layers.push_back(std::move(layer));
  }
  const std::string path = scratch.file(fmt::format("{}-{}.oscar.safetensors", model.name, seed));
  save_artifact(artifact, path);
  return path;
}

std::string fitted_artifact(const ModelUnderTest& model) {
  static const Scratch scratch;  // until the process ends
  std::string path = scratch.file(model.name + ".oscar.safetensors");
  if (std::filesystem::exists(path)) return path;
  const GgufModel description = describe_model(Gguf(model.path()));
  const std::size_t tokens =
      model.n_full < model.n_layer ? 700 : 600;  // past the windows, ours and the model's, by more keys than a fit needs
  const std::string file = scratch.file(model.name + ".moments.safetensors");
  const json begin = {{"do", "capture_begin"},
                      {"resume", ""},
                      {"model",
                       {{"fingerprint", description.fingerprint},
                        {"architecture", description.architecture},
                        {"name", model.name},
                        {"n_layer", description.n_layer},
                        {"sources", {{{"name", "words"}, {"sha256", std::string(64, 'a')}, {"tokens", tokens}}}}}}};
  const RunResult run = run_driver(scratch, model,
                                   {begin,
                                    context({{"n_ctx", 1024}}),
                                    {{"do", "capture_sequence"}},
                                    decode(part(0, 90, 0, tokens), 1, 128),
                                    {{"do", "capture_save"}, {"file", file}}},
                                   {.mode = "capture"});
  if (run.exit_code != 0) fail("the capture for an artifact ended with {}: {}", run.exit_code, run.errors);
  FitOptions options;
  options.token_floor = 1;
  Artifact artifact = fit(load_moments(file), options, nullptr);
  save_artifact(artifact, path);
  return path;
}

double kl_divergence(std::span<const float> base, std::span<const float> other) {
  const auto log_sum = [](std::span<const float> row) {
    const double top = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const float x : row) sum += std::exp(static_cast<double>(x) - top);
    return top + std::log(sum);
  };
  const double base_log_sum = log_sum(base);
  const double other_log_sum = log_sum(other);
  double kl = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const double p = static_cast<double>(base[i]) - base_log_sum;
    const double q = static_cast<double>(other[i]) - other_log_sum;
    kl += std::exp(p) * (p - q);
  }
  return kl;
}

double max_difference(std::span<const float> a, std::span<const float> b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isfinite(difference) ? std::max(worst, difference) : HUGE_VAL;
  }
  return worst;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace oscar::testing

// libllama and the plug-in in this process: RAII around the C API, and the numbers every command reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "llama.h"
#include "settings.h"

namespace oscar::cli {

std::filesystem::path library_folder();  // of the ggml this program is linked with

// The plug-in, loaded as a ggml backend and configured through plugin_api.h.
class Plugin {
 public:
  // Loads ggml's own backends, and the plug-in when `wanted`. Once per process.
  static void start(bool wanted, bool verbose);
  static bool loaded();
  static void configure(const nlohmann::json& settings);
  static nlohmann::json stats();  // {} when not loaded
  static void capture_begin(const nlohmann::json& model, const std::string& resume);
  static void capture_output_metric(int layer, const std::vector<float>& values);
  static void capture_sequence();
  static void capture_sources(const nlohmann::json& sources);
  static void capture_save(const std::string& path);
  static void capture_end();  // no context may be left
};

class Model {
 public:
  explicit Model(const HostOptions& options);  // Error when llama.cpp refuses the file
  [[nodiscard]] llama_model* get() const { return model_.get(); }
  [[nodiscard]] const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
  [[nodiscard]] int n_vocab() const { return llama_vocab_n_tokens(vocab()); }
  [[nodiscard]] std::vector<llama_token> tokenize(const std::string& text, bool add_special, bool parse_special) const;
  [[nodiscard]] std::string piece(llama_token token) const;
  [[nodiscard]] std::string description() const;
  [[nodiscard]] bool has_chat_template() const { return llama_model_chat_template(model_.get(), nullptr) != nullptr; }
  struct Turn {
    std::string role, content;
  };
  [[nodiscard]] std::string apply_template(const std::vector<Turn>& turns, bool add_assistant) const;

 private:
  std::unique_ptr<llama_model, decltype(&llama_model_free)> model_{nullptr, &llama_model_free};
};

class Context {
 public:
  Context(const Model& model, const HostOptions& options);  // flash attention on, one sequence
  [[nodiscard]] llama_context* get() const { return context_.get(); }
  [[nodiscard]] int n_ctx() const { return static_cast<int>(llama_n_ctx(context_.get())); }
  void clear() { llama_memory_clear(llama_get_memory(context_.get()), true); }
  // Decodes tokens at positions first ...; logits of the positions >= first_logits (in order) are then in logits(i), i counting
  // those rows from 0. Returns the seconds taken. Error naming the position when llama.cpp fails.
  double decode(const std::vector<llama_token>& tokens, int first, int first_logits);
  [[nodiscard]] const float* logits(int row) const;
  // Forgets the positions from `position` on, so that the next decode starts there. Error when the cache cannot go back.
  void rewind(int position);

 private:
  std::unique_ptr<llama_context, decltype(&llama_free)> context_{nullptr, &llama_free};
};

// What one context's caches take, out of the plug-in's counters.
struct CacheReport {
  std::uint64_t nominal_bytes = 0;   // what 16 bit takes for all cells
  std::uint64_t resident_bytes = 0;  // measured, windows and 16-bit layers included; simulated: what the rival would take
  double bits_per_element = 0, bits_per_element_all = 0;  // of the layers OSCAR serves; 16 when not coded, 0 when unknown
  // Of all coded values, those outside the code's range (spectral: 2-5 % by design); nullopt: nothing coded, or simulated.
  std::optional<double> saturated_share;
};
// `index`: which context of this process, in order of creation; `contexts`: how many there are.
CacheReport cache_report(const nlohmann::json& stats, std::size_t index, std::size_t contexts);

std::string read_text(const std::string& path);  // "-": stdin; Error when it cannot be read or is empty
std::uint64_t peak_rss_bytes();
std::uint64_t counter(const nlohmann::json& stats, const char* key);
std::uint64_t served_operations(const nlohmann::json& stats);  // attention operations computed or (mode delegate) forwarded

// True once Ctrl-C (or SIGTERM) came; the second one ends the process at once.
void watch_interrupts();
bool interrupted();

}  // namespace oscar::cli

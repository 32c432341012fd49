#include "session.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <thread>

#include "ggml-backend.h"
#include "oscar/base/error.h"
#include "settings.h"

namespace oscar::cli {
namespace {

using TextFunction = const char* (*)();
using ConfigureFunction = const char* (*)(const char*);
using BeginFunction = const char* (*)(const char*, const char*);

void* plugin_handle = nullptr;
bool verbose_log = false;

template <class Function>
Function symbol(const char* name) {
  if (plugin_handle == nullptr) fail("{} was called before the plug-in was loaded", name);
  void* address = dlsym(plugin_handle, name);
  if (address == nullptr) fail("the plug-in has no function {}: it is of another OSCAR version, reinstall both", name);
  return reinterpret_cast<Function>(address);
}

void must(const char* message) {
  if (message != nullptr) throw Error(message);
}

// llama.cpp is chatty at INFO; its errors stay visible.
void log_message(ggml_log_level level, const char* text, void*) {
  static ggml_log_level last = GGML_LOG_LEVEL_INFO;
  if (level != GGML_LOG_LEVEL_CONT) last = level;
  if (verbose_log || last == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

volatile std::sig_atomic_t interrupt_count = 0;
void on_interrupt(int signal) {
  interrupt_count = interrupt_count + 1;
  if (interrupt_count > 1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

std::filesystem::path library_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&ggml_backend_load), &info) == 0 || info.dli_fname == nullptr)
    fail("libggml cannot be located");
  return std::filesystem::absolute(info.dli_fname).parent_path();
}

void Plugin::start(bool wanted, bool verbose) {
  verbose_log = verbose;
  llama_log_set(log_message, nullptr);
  ggml_backend_load_all_from_path(library_folder().c_str());
  if (wanted) {
    const std::string path = find_plugin().string();
    if (ggml_backend_load(path.c_str()) == nullptr) {
      fail("the plug-in {} does not fit this llama.cpp (ggml {}); rebuild OSCAR against it", path, ggml_version());
    }
    plugin_handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (plugin_handle == nullptr) fail("the plug-in {} was loaded but cannot be reached: {}", path, dlerror());
  }
  llama_backend_init();
}

bool Plugin::loaded() { return plugin_handle != nullptr; }

void Plugin::configure(const nlohmann::json& settings) {
  must(symbol<ConfigureFunction>("oscar_llama_configure")(settings.dump().c_str()));
}

nlohmann::json Plugin::stats() {
  if (!loaded()) return nlohmann::json::object();
  return nlohmann::json::parse(symbol<TextFunction>("oscar_llama_stats")());
}

void Plugin::capture_begin(const nlohmann::json& model, const std::string& resume) {
  must(symbol<BeginFunction>("oscar_llama_capture_begin")(model.dump().c_str(), resume.empty() ? nullptr : resume.c_str()));
}

void Plugin::capture_output_metric(int layer, const std::vector<float>& values) {
  using Function = const char* (*)(int, const float*, unsigned long long);
  must(symbol<Function>("oscar_llama_capture_output_metric")(layer, values.data(), values.size()));
}

void Plugin::capture_sequence() { must(symbol<TextFunction>("oscar_llama_capture_sequence")()); }

void Plugin::capture_sources(const nlohmann::json& sources) {
  must(symbol<ConfigureFunction>("oscar_llama_capture_sources")(sources.dump().c_str()));
}

void Plugin::capture_end() { must(symbol<TextFunction>("oscar_llama_capture_end")()); }

void Plugin::capture_save(const std::string& path) {
  must(symbol<ConfigureFunction>("oscar_llama_capture_save")(path.c_str()));
}

Model::Model(const HostOptions& options) {
  if (!std::filesystem::is_regular_file(options.model)) fail("there is no model file {}", options.model);
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;  // the plug-in serves the CPU backend
  model_.reset(llama_model_load_from_file(options.model.c_str(), params));
  if (!model_) fail("llama.cpp cannot load {} (-v shows why)", options.model);
  if (llama_model_has_encoder(model_.get()) || !llama_model_has_decoder(model_.get())) {
    fail("{} is not a decoder-only language model", options.model);
  }
}

std::vector<llama_token> Model::tokenize(const std::string& text, bool add_special, bool parse_special) const {
  if (text.size() > 0x3FFFFFFFU) fail("a text of {} bytes is too long to tokenise at once", text.size());
  std::vector<llama_token> tokens(text.size() + 8);
  const int n = llama_tokenize(vocab(), text.data(), static_cast<int>(text.size()), tokens.data(),
                               static_cast<int>(tokens.size()), add_special, parse_special);
  if (n < 0) fail("llama.cpp cannot tokenise this text of {} bytes", text.size());
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

std::string Model::piece(llama_token token) const {
  std::string out(64, '\0');
  int n = llama_token_to_piece(vocab(), token, out.data(), static_cast<int>(out.size()), 0, false);
  if (n < 0) {
    out.resize(static_cast<std::size_t>(-n));
    n = llama_token_to_piece(vocab(), token, out.data(), static_cast<int>(out.size()), 0, false);
  }
  out.resize(static_cast<std::size_t>(std::max(0, n)));
  return out;
}

std::string Model::description() const {
  std::string out(128, '\0');
  const int n = llama_model_desc(model_.get(), out.data(), out.size());
  out.resize(static_cast<std::size_t>(std::clamp(n, 0, 127)));
  return out;
}

std::string Model::apply_template(const std::vector<Turn>& turns, bool add_assistant) const {
  const char* format = llama_model_chat_template(model_.get(), nullptr);
  if (format == nullptr) fail("this model has no chat template: use -no-cnv for plain continuation");
  std::vector<llama_chat_message> messages;
  std::size_t size = 1024;
  for (const Turn& turn : turns) {
    messages.push_back({turn.role.c_str(), turn.content.c_str()});
    size += 2 * turn.content.size();
  }
  std::string out(size, '\0');
  int n = llama_chat_apply_template(format, messages.data(), messages.size(), add_assistant, out.data(),
                                    static_cast<int>(out.size()));
  if (n > static_cast<int>(out.size())) {
    out.resize(static_cast<std::size_t>(n));
    n = llama_chat_apply_template(format, messages.data(), messages.size(), add_assistant, out.data(),
                                  static_cast<int>(out.size()));
  }
  if (n < 0) fail("llama.cpp's C API does not know this model's chat template: use -no-cnv, or oscar exec -- llama-cli");
  out.resize(static_cast<std::size_t>(n));
  return out;
}

Context::Context(const Model& model, const HostOptions& options) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(options.n_ctx);
  params.n_batch = static_cast<std::uint32_t>(options.n_batch);
  params.n_ubatch = static_cast<std::uint32_t>(std::min(options.n_ubatch, options.n_batch));
  params.n_seq_max = 1;
  const int all = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  params.n_threads = params.n_threads_batch = options.n_threads > 0 ? options.n_threads : all;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.swa_full = false;  // what llama.cpp's own programs use
  params.no_perf = false;
  context_.reset(llama_init_from_model(model.get(), params));
  if (!context_) fail("llama.cpp cannot create a context of {} tokens (-v shows why)", options.n_ctx);
}

double Context::decode(const std::vector<llama_token>& tokens, int first, int first_logits) {
  const int limit = static_cast<int>(llama_n_batch(context_.get()));
  const int n = static_cast<int>(tokens.size());
  if (n > limit) fail("{} tokens were given to a batch of {}", n, limit);
  if (n == 0) return 0.0;
  llama_batch batch = llama_batch_init(n, 0, 1);
  for (int i = 0; i < n; ++i) {
    batch.token[i] = tokens[static_cast<std::size_t>(i)];
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = static_cast<std::int8_t>(first + i >= first_logits);
  }
  batch.n_tokens = n;
  const auto start = std::chrono::steady_clock::now();
  const int result = llama_decode(context_.get(), batch);
  if (result == 0) llama_synchronize(context_.get());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  llama_batch_free(batch);
  if (result == 1) fail("the context of {} tokens is full at position {}: use a larger -c", n_ctx(), first);
  if (result != 0) fail("llama.cpp failed (code {}) on the tokens from position {} (-v shows why)", result, first);
  return seconds;
}

const float* Context::logits(int row) const {
  const float* all = llama_get_logits(context_.get());
  const llama_vocab* vocab = llama_model_get_vocab(llama_get_model(context_.get()));
  return all + static_cast<std::ptrdiff_t>(row) * llama_vocab_n_tokens(vocab);
}

void Context::rewind(int position) {
  const llama_memory_t memory = llama_get_memory(context_.get());
  // A sliding-window cache may have overwritten what the positions before would see again.
  const int window = llama_model_n_swa(llama_get_model(context_.get()));
  const bool gone = window > 0 && llama_memory_seq_pos_min(memory, 0) > std::max(0, position + 1 - window);
  if (gone || !llama_memory_seq_rm(memory, 0, position, -1))
    fail("this model's cache cannot go back to position {}; a larger -ub keeps more of a sliding window", position);
}

std::uint64_t counter(const nlohmann::json& stats, const char* key) {
  const auto found = stats.find(key);
  return found != stats.end() && found->is_number() ? found->get<std::uint64_t>() : 0;
}

CacheReport cache_report(const nlohmann::json& stats, std::size_t index, std::size_t contexts) {
  CacheReport report;
  const nlohmann::json caches = stats.value("caches", nlohmann::json::array());
  if (contexts == 0 || caches.size() % contexts != 0) return report;
  const std::size_t each = caches.size() / contexts;  // a sliding-window model has two per context
  for (std::size_t i = index * each; i < (index + 1) * each; ++i) {
    const nlohmann::json& cache = caches[i];
    report.nominal_bytes += counter(cache, "nominal_bytes");
    const bool simulated = cache.value("simulated", false);
    report.resident_bytes += simulated ? counter(cache, "code_bytes") + counter(cache, "exact_bytes")
                                       : counter(cache, "resident_bytes") + counter(cache, "nominal_resident_bytes");
    if (!cache.value("sliding_window", false)) {
      const auto bits = [&](const char* key) {
        return cache.contains(key) && cache[key].is_number() ? cache[key].get<double>() : 16.0;
      };
      report.bits_per_element = bits("bits_per_element");
      report.bits_per_element_all = bits("bits_per_element_all");
      const std::uint64_t coded = counter(cache, "coded_values");
      if (coded > 0 && !simulated)
        report.saturated_share = static_cast<double>(counter(cache, "saturated")) / static_cast<double>(coded);
    }
  }
  return report;
}

std::uint64_t served_operations(const nlohmann::json& stats) {
  return counter(stats, "attention_served") + counter(stats, "attention_delegated");
}

namespace {

// Offset of the first byte that no UTF-8 text has there: stray or missing continuation bytes, overlong forms, surrogates,
// code points beyond 10FFFF (RFC 3629).
std::optional<std::size_t> find_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t at) -> unsigned { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
    const unsigned lead = byte(i);
    const std::size_t n = lead < 0x80                   ? 1
                          : lead >= 0xC2 && lead < 0xE0 ? 2
                          : (lead >> 4) == 0xE          ? 3
                          : lead >= 0xF0 && lead < 0xF5 ? 4
                                                        : 0;
    if (n == 0) return i;
    const unsigned second = byte(i + 1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
        (lead == 0xF4 && second > 0x8F))
      return i;
    for (std::size_t k = 1; k < n; ++k) {
      if ((byte(i + k) & 0xC0U) != 0x80U) return i;
    }
    i += n;
  }
  return std::nullopt;
}

}  // namespace

std::string read_text(const std::string& path) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    if (!std::filesystem::exists(path)) fail("there is no text file {}", path);
    if (std::filesystem::is_directory(path)) fail("{} is a directory; name a text file", path);
    std::ifstream stream(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(stream), {});
    if (!stream) fail("{} cannot be read", path);
  }
  const std::string name = path == "-" ? "on stdin" : path;
  if (text.empty()) fail("the text {} is empty", name);
  if (const std::size_t at = text.find('\0'); at != std::string::npos)
    fail("the text {} has a zero byte at offset {}: it is not a text file", name, at);
  if (const std::optional<std::size_t> at = find_invalid_utf8(text))
    fail("the text {} is not UTF-8 (byte {}): convert it first, for example with iconv", name, *at);
  return text;
}

std::uint64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024U;
}

void watch_interrupts() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
}

bool interrupted() { return interrupt_count > 0; }

}  // namespace oscar::cli

// Runs a script of llama.cpp calls on a real model, through libllama's C API only, with or without the plug-in. The plug-in's
// mode belongs to a process, so the tests run this program once per mode and compare what it writes.
//
//   oscar_llama_driver --model M.gguf [--plugin liboscar-llama.so] [--logits FILE] [--threads N] < script.json
//
// The script is a JSON array of steps {"do": NAME, ...}, executed in order (a new "context" frees the one before):
//   context   n_ctx, n_batch, n_ubatch, n_seq_max, kv_unified, swa_full, type_k, type_v, flash_attn ("on" | "off" | "auto")
//   decode    parts [{seq (or seqs), seed, from, count, pos}]: tokens from .. from+count of the text `seed`, at positions pos
//   ..;
//             parts are interleaved token by token; chunk: tokens per llama_decode call; logits: rows wanted per part, from its
//             end
//   greedy    seq, pos, count: continues from the last row of logits with the most likely token
//   observe   on: adds up the squares of attention inputs and outputs from now on ("observe": true in the context step slices
//             every graph at its attention); the result of the step that switches it off holds {layer: {q, o}}, each
//             [n_head_kv][head_dim], summed over tokens and the query heads of a KV head
//   store_only  width, head_dim, rows: a graph of our own that rotates rows, writes them into a cache of layer 0 and never
//   attends; reports the
//             largest difference between what was written and what is read back, relative to the largest value
//   empty     a batch of zero tokens (its return code is a result, not an error)
//   rm, cp, add, keep, clear      the llama_memory_* calls; seq, from, to, p0, p1, delta, data
//   save, load    file, seq (absent: the whole context)
//   stats, memory, configure (json), capture_begin (model, resume), capture_sequence, capture_save (file)
// stdout: one JSON object {loaded, n_vocab, rows, results: [one per step]}. FILE: rows * n_vocab floats.
#include <dlfcn.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llama/text.h"
#include "oscar/base/error.h"

namespace {

using nlohmann::json;
using oscar::fail;

struct PluginApi {
  const char* (*stats)() = nullptr;
  const char* (*configure)(const char*) = nullptr;
  const char* (*capture_begin)(const char*, const char*) = nullptr;
  const char* (*capture_sequence)() = nullptr;
  const char* (*capture_save)(const char*) = nullptr;
};

template <class Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) fail("the plug-in does not export {}", name);
}

void expect_success(const char* message) {
  if (message != nullptr) fail("{}", message);
}

ggml_type parse_type(const std::string& name) {
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const char* candidate = ggml_type_name(static_cast<ggml_type>(i));
    if (candidate != nullptr && name == candidate) return static_cast<ggml_type>(i);
  }
  fail("unknown tensor type {}", name);
}

long status_kib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(key + ":", 0) == 0) return std::stol(line.substr(key.size() + 1));
  }
  fail("/proc/self/status has no {}", key);
}

class Driver {
 public:
  Driver(const std::string& model_path, const std::string& plugin_path, const std::string& logits_path, int threads)
      : threads_(threads) {
    ggml_backend_load_all_from_path(OSCAR_LLAMA_LIB_DIR);
    if (!plugin_path.empty()) load_plugin(plugin_path);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    model_.reset(llama_model_load_from_file(model_path.c_str(), params));
    if (!model_) fail("cannot load the model {}", model_path);
    vocab_ = llama_model_get_vocab(model_.get());
    n_vocab_ = llama_vocab_n_tokens(vocab_);
    if (!logits_path.empty()) {
      logits_.open(logits_path, std::ios::binary);
      if (!logits_) fail("cannot write {}", logits_path);
    }
  }

  json run(const json& script) {
    json results = json::array();
    for (const json& step : script) {
      const auto start = std::chrono::steady_clock::now();
      json result = execute(step);
      result["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      results.push_back(std::move(result));
    }
    context_.reset();
    return {{"loaded", loaded_}, {"n_vocab", n_vocab_}, {"rows", rows_}, {"results", results}};
  }

 private:
  struct ModelFree {
    void operator()(llama_model* m) const { llama_model_free(m); }
  };
  struct ContextFree {
    void operator()(llama_context* c) const { llama_free(c); }
  };
  struct Entry {
    llama_token token;
    llama_pos pos;
    std::vector<llama_seq_id> seqs;
    bool output;
  };

  void load_plugin(const std::string& path) {
    loaded_ = ggml_backend_load(path.c_str()) != nullptr;
    if (!loaded_) return;
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) fail("{} was loaded but is not resident", path);
    resolve(library, "oscar_llama_stats", api_.stats);
    resolve(library, "oscar_llama_configure", api_.configure);
    resolve(library, "oscar_llama_capture_begin", api_.capture_begin);
    resolve(library, "oscar_llama_capture_sequence", api_.capture_sequence);
    resolve(library, "oscar_llama_capture_save", api_.capture_save);
  }

  const std::vector<llama_token>& tokens(std::uint64_t seed, std::size_t count) {
    std::vector<llama_token>& list = texts_[seed];
    // A sentence of n words has at least n tokens in every tokenizer, so `count` words always suffice.
    if (list.size() < count) {
      const std::string text = oscar::testing::make_text(seed, std::max<std::size_t>(count, 256) * 2);
      list.resize(text.size() + 2);
      const int n = llama_tokenize(vocab_, text.data(), static_cast<int>(text.size()), list.data(),
                                   static_cast<int>(list.size()), true, false);
      if (n < static_cast<int>(count)) fail("the text gave only {} tokens of {}", n, count);
      list.resize(static_cast<std::size_t>(n));
    }
    return list;
  }

  void create_context(const json& step) {
    context_.reset();
    llama_context_params params = llama_context_default_params();
    params.n_ctx = step.value("n_ctx", 1024U);
    params.n_batch = step.value("n_batch", 512U);
    params.n_ubatch = step.value("n_ubatch", 512U);
    params.n_seq_max = step.value("n_seq_max", 1U);
    params.kv_unified = step.value("kv_unified", false);
    params.swa_full = step.value("swa_full", true);
    params.n_threads = params.n_threads_batch = threads_;
    params.rope_freq_base = step.value("rope_freq_base", 0.0F);
    params.type_k = parse_type(step.value("type_k", "f16"));
    params.type_v = parse_type(step.value("type_v", "f16"));
    if (step.value("observe", false)) {
      params.cb_eval = [](ggml_tensor* tensor, bool ask, void* self) {
        return static_cast<Driver*>(self)->observe(tensor, ask);
      };
      params.cb_eval_user_data = this;
    }
    const std::string flash = step.value("flash_attn", "on");
    params.flash_attn_type = flash == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                             : flash == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                              : LLAMA_FLASH_ATTN_TYPE_AUTO;
    context_.reset(llama_init_from_model(model_.get(), params));
    if (!context_) fail("cannot create the context {}", step.dump());
    memory_ = llama_get_memory(context_.get());
  }

  // Called before (ask) and after every node; true for attention cuts the graph there.
  bool observe(ggml_tensor* node, bool ask) {
    const bool attention = std::string_view(ggml_op_name(node->op)) == "FLASH_ATTN_EXT";
    if (ask || !attention || !observing_) return ask ? attention : true;
    const ggml_tensor* root = node->src[1];
    while (root->view_src != nullptr) root = root->view_src;
    constexpr std::string_view kPrefix = "cache_k_l";
    if (std::string_view(root->name).substr(0, kPrefix.size()) != kPrefix) fail("attention on {}, not on a cache", root->name);
    json& layer = observed_[root->name + kPrefix.size()];
    const std::int64_t n_head_kv = node->src[1]->ne[2];
    add_squares(*node->src[0], n_head_kv, 1, 2, layer["q"]);
    add_squares(*node, n_head_kv, 2, 1, layer["o"]);
    return true;
  }

  static void add_squares(const ggml_tensor& rows, std::int64_t n_head_kv, int token_dim, int head_dim, json& sums) {
    if (sums.is_null())
      sums = std::vector(static_cast<std::size_t>(n_head_kv), std::vector(static_cast<std::size_t>(rows.ne[0]), 0.0));
    auto totals = sums.get<std::vector<std::vector<double>>>();
    const std::int64_t group = rows.ne[head_dim] / n_head_kv;
    for (std::int64_t stream = 0; stream < rows.ne[3]; ++stream) {
      for (std::int64_t token = 0; token < rows.ne[token_dim]; ++token) {
        for (std::int64_t head = 0; head < rows.ne[head_dim]; ++head) {
          const auto* row = reinterpret_cast<const float*>(
              static_cast<const char*>(rows.data) + static_cast<std::size_t>(stream) * rows.nb[3] +
              static_cast<std::size_t>(token) * rows.nb[token_dim] + static_cast<std::size_t>(head) * rows.nb[head_dim]);
          std::vector<double>& total = totals[static_cast<std::size_t>(head / group)];
          for (std::size_t d = 0; d < total.size(); ++d) total[d] += static_cast<double>(row[d]) * static_cast<double>(row[d]);
        }
      }
    }
    sums = totals;
  }

  int decode_entries(const Entry* entries, std::size_t n) {
    llama_batch batch = llama_batch_init(static_cast<int>(std::max<std::size_t>(n, 1)), 0, 8);
    batch.n_tokens = static_cast<int>(n);
    for (std::size_t i = 0; i < n; ++i) {
      batch.token[i] = entries[i].token;
      batch.pos[i] = entries[i].pos;
      batch.n_seq_id[i] = static_cast<int>(entries[i].seqs.size());
      std::copy(entries[i].seqs.begin(), entries[i].seqs.end(), batch.seq_id[i]);
      batch.logits[i] = entries[i].output ? 1 : 0;
    }
    const int code = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    if (code != 0) return code;
    for (std::size_t i = 0; i < n; ++i) {
      if (entries[i].output) emit(llama_get_logits_ith(context_.get(), static_cast<int>(i)));
    }
    return 0;
  }

  void emit(const float* row) {
    if (row == nullptr) fail("llama.cpp returned no logits");
    last_row_.assign(row, row + n_vocab_);
    if (logits_.is_open())
      logits_.write(reinterpret_cast<const char*>(row), static_cast<std::streamsize>(sizeof(float)) * n_vocab_);
    ++rows_;
  }

  json decode(const json& step) {
    struct Part {
      std::vector<llama_seq_id> seqs;
      std::uint64_t seed;
      std::size_t from, count;
      llama_pos pos;
    };
    const std::size_t wanted = step.value("logits", std::size_t{1});
    std::vector<Part> parts;
    std::size_t longest = 0;
    for (const json& part : step.at("parts")) {
      parts.push_back({part.contains("seqs") ? part.at("seqs").get<std::vector<llama_seq_id>>()
                                             : std::vector<llama_seq_id>{part.value("seq", 0)},
                       part.value("seed", std::uint64_t{1}), part.value("from", std::size_t{0}),
                       part.at("count").get<std::size_t>(), 0});
      parts.back().pos = part.value("pos", static_cast<llama_pos>(parts.back().from));
      longest = std::max(longest, parts.back().count);
      tokens(parts.back().seed, parts.back().from + parts.back().count);
    }
    std::vector<Entry> entries;
    for (std::size_t t = 0; t < longest; ++t) {
      for (const Part& part : parts) {
        if (t >= part.count) continue;
        entries.push_back(
            {texts_.at(part.seed)[part.from + t], part.pos + static_cast<llama_pos>(t), part.seqs, part.count - t <= wanted});
      }
    }
    const std::size_t chunk = step.value("chunk", std::size_t{512});
    for (std::size_t i = 0; i < entries.size(); i += chunk) {
      const int code = decode_entries(&entries[i], std::min(chunk, entries.size() - i));
      if (code != 0) fail("llama_decode returned {}", code);
    }
    return {{"tokens", entries.size()}};
  }

  json greedy(const json& step) {
    json chosen = json::array();
    llama_pos pos = step.at("pos");
    for (int i = step.at("count"); i > 0; --i, ++pos) {
      if (last_row_.empty()) fail("greedy needs logits from a step before it");
      const auto best = std::max_element(last_row_.begin(), last_row_.end()) - last_row_.begin();
      chosen.push_back(best);
      const Entry entry{static_cast<llama_token>(best), pos, {step.value("seq", 0)}, true};
      if (const int code = decode_entries(&entry, 1); code != 0) fail("llama_decode returned {}", code);
    }
    return {{"tokens", chosen}};
  }

  // Tensors of one kind, in a buffer of their own.
  struct TensorBlock {
    explicit TensorBlock(std::size_t n) : context(ggml_init({n * ggml_tensor_overhead(), nullptr, true})) {}
    ~TensorBlock() {
      ggml_backend_buffer_free(buffer);
      ggml_free(context);
    }
    TensorBlock(const TensorBlock&) = delete;
    TensorBlock& operator=(const TensorBlock&) = delete;
    void allocate(ggml_backend_t backend) {
      buffer = ggml_backend_alloc_ctx_tensors(context, backend);
      if (buffer == nullptr) fail("cannot allocate tensors");
    }
    ggml_context* context;
    ggml_backend_buffer_t buffer = nullptr;
  };

  json store_only(const json& step) {
    const std::int64_t width = step.at("width");
    const std::int64_t head_dim = step.at("head_dim");
    const std::int64_t n = step.at("rows");
    const std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> backend(
        ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr), ggml_backend_free);
    if (!backend) fail("there is no CPU backend");
    TensorBlock cache(2);
    ggml_tensor* k = ggml_new_tensor_3d(cache.context, GGML_TYPE_F16, width, 64, 1);
    ggml_tensor* v = ggml_new_tensor_3d(cache.context, GGML_TYPE_F16, width, 64, 1);
    ggml_set_name(k, "cache_k_l0");
    ggml_set_name(v, "cache_v_l0");
    cache.allocate(backend.get());
    ggml_backend_buffer_clear(cache.buffer, 0);
    TensorBlock inputs(3);
    ggml_tensor* rows = ggml_new_tensor_2d(inputs.context, GGML_TYPE_F32, width, n);
    ggml_tensor* cells = ggml_new_tensor_1d(inputs.context, GGML_TYPE_I64, n);
    ggml_tensor* positions = ggml_new_tensor_1d(inputs.context, GGML_TYPE_I32, n);
    inputs.allocate(backend.get());
    std::vector<float> values(static_cast<std::size_t>(width * n));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(static_cast<int>(i * 7919 % 2003) - 1001) / 1001.0F;
    std::vector<std::int64_t> targets;
    std::vector<std::int32_t> at;
    for (std::int64_t i = 0; i < n; ++i) {
      targets.push_back(2 * i + 1);
      at.push_back(static_cast<std::int32_t>(i));
    }
    ggml_backend_tensor_set(rows, values.data(), 0, values.size() * sizeof(float));
    ggml_backend_tensor_set(cells, targets.data(), 0, targets.size() * sizeof(std::int64_t));
    ggml_backend_tensor_set(positions, at.data(), 0, at.size() * sizeof(std::int32_t));

    double worst = 0;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::unique_ptr<ggml_context, void (*)(ggml_context*)> work(ggml_init({std::size_t{1} << 20, nullptr, true}),
                                                                        ggml_free);
      ggml_cgraph* graph = ggml_new_graph(work.get());
      ggml_tensor* heads = ggml_reshape_3d(work.get(), rows, head_dim, width / head_dim, n);
      ggml_tensor* rotated = ggml_rope(work.get(), heads, positions, static_cast<int>(head_dim), GGML_ROPE_TYPE_NORMAL);
      ggml_build_forward_expand(graph, ggml_set_rows(work.get(), k, ggml_reshape_2d(work.get(), rotated, width, n), cells));
      ggml_build_forward_expand(graph, ggml_set_rows(work.get(), v, rows, cells));
      const std::unique_ptr<ggml_gallocr, void (*)(ggml_gallocr_t)> allocator(
          ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())), ggml_gallocr_free);
      if (!ggml_gallocr_alloc_graph(allocator.get(), graph)) fail("cannot allocate the graph");
      if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) fail("the graph failed");
      for (const ggml_tensor* tensor : {k, v}) {
        std::vector<ggml_fp16_t> row(static_cast<std::size_t>(width));
        // Position 0 is not rotated: K can be compared there without computing RoPE.
        for (std::int64_t i = 0; i < (tensor == k ? 1 : n); ++i) {
          ggml_backend_tensor_get(tensor, row.data(),
                                  static_cast<std::size_t>(targets[static_cast<std::size_t>(i)] * width) * 2, row.size() * 2);
          for (std::size_t d = 0; d < row.size(); ++d) {
            const float difference = ggml_fp16_to_fp32(row[d]) - values[static_cast<std::size_t>(i * width) + d];
            worst = std::max(worst, std::abs(static_cast<double>(difference)));
          }
        }
      }
    }
    return {{"worst", worst}};
  }

  json save(const json& step) {
    const std::string file = step.at("file");
    if (!step.contains("seq")) {
      if (!llama_state_save_file(context_.get(), file.c_str(), nullptr, 0)) fail("cannot save the state to {}", file);
      return json::object();
    }
    const std::size_t bytes = llama_state_seq_save_file(context_.get(), file.c_str(), step.at("seq"), nullptr, 0);
    if (bytes == 0) fail("cannot save sequence {} to {}", step.at("seq").get<int>(), file);
    return {{"bytes", bytes}};
  }

  json load(const json& step) {
    const std::string file = step.at("file");
    // Without room for tokens, llama.cpp only looks at the file and restores nothing.
    std::vector<llama_token> none(1);
    std::size_t count = 0;
    bool ok = false;
    if (step.contains("seq")) {
      ok = llama_state_seq_load_file(context_.get(), file.c_str(), step.at("seq"), none.data(), none.size(), &count) != 0;
    } else {
      ok = llama_state_load_file(context_.get(), file.c_str(), none.data(), none.size(), &count);
    }
    return {{"ok", ok}};
  }

  json execute(const json& step) {
    const std::string what = step.at("do");
    const llama_seq_id seq = step.value("seq", 0);
    const llama_pos p0 = step.value("p0", -1);
    const llama_pos p1 = step.value("p1", -1);
    if (what == "context") {
      create_context(step);
    } else if (what == "free") {
      context_.reset();
    } else if (what == "decode") {
      return decode(step);
    } else if (what == "greedy") {
      return greedy(step);
    } else if (what == "observe") {
      observing_ = step.at("on");
      if (!observing_) return {{"observed", std::exchange(observed_, json::object())}};
    } else if (what == "empty") {
      return {{"code", decode_entries(nullptr, 0)}};
    } else if (what == "store_only") {
      return store_only(step);
    } else if (what == "rm") {
      return {{"ok", llama_memory_seq_rm(memory_, seq, p0, p1)}};
    } else if (what == "cp") {
      llama_memory_seq_cp(memory_, step.at("from"), step.at("to"), p0, p1);
    } else if (what == "add") {
      if (!llama_memory_can_shift(memory_)) fail("this context cannot shift");
      llama_memory_seq_add(memory_, seq, p0, p1, step.at("delta"));
    } else if (what == "keep") {
      llama_memory_seq_keep(memory_, seq);
    } else if (what == "clear") {
      llama_memory_clear(memory_, step.value("data", true));
    } else if (what == "save") {
      return save(step);
    } else if (what == "load") {
      return load(step);
    } else if (what == "memory") {
      return {{"rss_kib", status_kib("VmRSS")}, {"peak_kib", status_kib("VmHWM")}};
    } else if (what == "stats") {
      return {{"stats", api_.stats != nullptr ? json::parse(api_.stats()) : json()}};
    } else if (what == "configure") {
      expect_success(api_.configure(step.at("json").dump().c_str()));
    } else if (what == "capture_begin") {
      const std::string resume = step.value("resume", "");
      expect_success(api_.capture_begin(step.at("model").dump().c_str(), resume.empty() ? nullptr : resume.c_str()));
    } else if (what == "capture_sequence") {
      expect_success(api_.capture_sequence());
    } else if (what == "capture_save") {
      expect_success(api_.capture_save(step.at("file").get<std::string>().c_str()));
    } else {
      fail("unknown step {}", what);
    }
    return json::object();
  }

  int threads_;
  bool loaded_ = false;
  PluginApi api_;
  std::unique_ptr<llama_model, ModelFree> model_;
  std::unique_ptr<llama_context, ContextFree> context_;
  llama_memory_t memory_ = nullptr;
  const llama_vocab* vocab_ = nullptr;
  int n_vocab_ = 0;
  std::int64_t rows_ = 0;
  std::ofstream logits_;
  std::vector<float> last_row_;
  bool observing_ = false;
  json observed_ = json::object();
  std::map<std::uint64_t, std::vector<llama_token>> texts_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    std::map<std::string, std::string> options{{"--model", ""}, {"--plugin", ""}, {"--logits", ""}, {"--threads", "2"}};
    for (int i = 1; i + 1 < argc; i += 2) {
      if (options.count(argv[i]) == 0) fail("unknown option {}", argv[i]);
      options[argv[i]] = argv[i + 1];
    }
    if (std::getenv("OSCAR_TEST_VERBOSE") == nullptr) {
      llama_log_set(
          [](ggml_log_level level, const char* text, void*) {
            if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
          },
          nullptr);
    }
    const json script = json::parse(std::string(std::istreambuf_iterator<char>(std::cin), {}));
    Driver driver(options["--model"], options["--plugin"], options["--logits"], std::stoi(options["--threads"]));
    std::cout << driver.run(script).dump() << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oscar_llama_driver: error: %s\n", error.what());
    return 1;
  }
}

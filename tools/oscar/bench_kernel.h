// Attention and store operations on one made-up layer, ours and llama.cpp's own, run by ggml's CPU backend in this process.
//
// All contenders run as nodes of ggml graphs on one pool of ggml's threads: FLASH_ATTN_EXT and SET_ROWS are llama.cpp's code,
// ours are custom operations, as the plug-in's are. Only the operation is timed, between two nodes that take the time after
// ggml's barrier. Before each operation all threads read a buffer twice as large as the last cache, as a model's weights and
// other layers pass between two visits to a layer, so that caches and tables are cold for everybody; and operations take turns
// over several layers.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench_layer.h"
#include "oscar/attention/attention.h"
#include "oscar/cache/kv_cache.h"

namespace oscar::cli {

enum class KernelOperation { decode, prefill, append_one, append };  // append: of as many tokens as prefill
enum class Contender { ours, f16, q8_0, q4_0 };
inline constexpr std::size_t kContenders = 4;
const char* to_text(Contender contender);

// ggml's CPU backend with a pool of its own that lives between graphs, as llama.cpp's programs have.
class GgmlThreads {
 public:
  GgmlThreads(int n_threads, bool cold);  // after Plugin::start()
  ~GgmlThreads();
  GgmlThreads(const GgmlThreads&) = delete;
  GgmlThreads& operator=(const GgmlThreads&) = delete;
  [[nodiscard]] ggml_backend_t backend() const { return backend_; }
  [[nodiscard]] int size() const { return n_threads_; }
  [[nodiscard]] const std::vector<std::uint64_t>& eviction() const { return eviction_; }  // empty: operations are not cold

 private:
  int n_threads_;
  ggml_backend_t backend_ = nullptr;
  ggml_threadpool* pool_ = nullptr;
  std::vector<std::uint64_t> eviction_;
};

struct KernelSetup {
  AttentionShape shape;
  std::int64_t depth = 0;     // tokens in the cache before the operation's own
  std::int64_t n_tokens = 0;  // of prefill and append
  std::string codec = "spectral";
  bool rope_mean = true;
  Windows windows;
  std::vector<Contender> stock;  // whose caches are filled beside ours
};

// A cache of `depth` tokens for each contender, filled through their own store operations, and the graphs that work on them.
class KernelWorld {
 public:
  KernelWorld(GgmlThreads& threads, const KernelSetup& setup, const std::function<void(double)>& filled);
  ~KernelWorld();
  KernelWorld(const KernelWorld&) = delete;
  KernelWorld& operator=(const KernelWorld&) = delete;

  // Operations come in the order of the enumeration's batches: after those of n_tokens none of one token.
  void prepare(KernelOperation operation);
  // One operation whose time only says how many make a measurement. Before measure().
  void warm_up(Contender contender);
  // Seconds of one operation: the median over several, on all layers in turn.
  double measure(Contender contender);
  // |ours - f16| / |f16| of the attention's last outputs, after measure() of both: all layers hold the same rows.
  [[nodiscard]] double difference() const;
  // Pairs of a visible key and a query head (attention), or stored values of K and V (append).
  [[nodiscard]] double work() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oscar::cli

// One KV buffer of llama.cpp: recognised by its first tensor, converted in place, then served by OSCAR or left to stock.
//
// Life: init_tensor of a tensor named exactly cache_k_l<N> or cache_v_l<N> converts the buffer (interface, type, context);
// its memory is still untouched then. complete() runs when the last tensor is placed and decides what CAN be done (artifact,
// types, sliding windows). The first graph that touches the buffer decides what IS done (flash attention or not): until then
// the memory is plain, so that a state may be loaded before the first token.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "artifact_source.h"
#include "config.h"
#include "host.h"
#include "oscar/base/error.h"
#include "oscar/cache/kv_cache.h"
#include "sequence_tracker.h"

namespace oscar::llama {

// A row of a saved state that this cache cannot take: damaged, or coded under other settings.
class UnusableRow : public Error {
 public:
  using Error::Error;
};

struct CacheTensor {
  std::string name;
  int layer = 0;
  bool is_k = false;
  std::byte* data = nullptr;  // nominal memory
  std::int64_t n_embd = 0, kv_size = 0, n_stream = 0;
  std::size_t row_bytes = 0;
  int layer_index = -1;  // in KvBuffer::layers

  // Global cell (stream * kv_size + cell) of an address inside the tensor; -1 when it is not at the start of a row.
  [[nodiscard]] std::int64_t cell_of(const void* address) const {
    const auto offset = static_cast<const std::byte*>(address) - data;
    const auto row = static_cast<std::ptrdiff_t>(row_bytes);
    return offset % row == 0 ? offset / row : -1;
  }
};

// What the graphs have shown of one layer.
struct CacheLayer {
  int layer = 0;
  CacheTensor* k = nullptr;
  CacheTensor* v = nullptr;
  int n_head_kv = 0, k_dim = 0, v_dim = 0;  // 0: not seen yet
  bool rope_seen = false;
  RopeParams rope;
  bool verified = false;  // geometry and RoPE agree with what is served
};

enum class Service {
  undecided,  // no graph yet; memory is plain
  delegate,   // hooks forward only (modes delegate and capture)
  served,     // rows live in `cache`
  sliding,    // sliding-window layers: stock memory and operations, by design
  plain,      // refused: stock memory and operations, counted as bypass
};

class KvBuffer {
 public:
  KvBuffer(ggml_backend_buffer_t owner, Config configuration);
  ~KvBuffer();
  KvBuffer(const KvBuffer&) = delete;
  KvBuffer& operator=(const KvBuffer&) = delete;

  [[nodiscard]] CacheTensor* find(const ggml_tensor* tensor) const;  // by its root's memory; null: none of ours
  [[nodiscard]] std::int64_t n_cells() const;
  void add(const ggml_tensor* tensor);  // may end in complete()
  void add_foreign(const ggml_tensor* tensor);
  void complete();  // idempotent

  // Starts serving with the geometry learnt so far: makes the cache and moves rows of a loaded state into it.
  void serve();
  // Gives the buffer back to stock operations; rows already stored are written to the nominal memory.
  void give_up(const std::string& why);

  // Tensor data access of the host. Offsets are relative to tensor->data; sizes in bytes.
  void read(const ggml_tensor* tensor, void* out, std::size_t offset, std::size_t size);
  void write(const ggml_tensor* tensor, const void* in, std::size_t offset, std::size_t size);
  void fill(const ggml_tensor* tensor, std::uint8_t value, std::size_t offset, std::size_t size);
  bool copy(const ggml_tensor* source, const ggml_tensor* destination);
  void clear(std::uint8_t value);

  // One batch: place() when its rows are about to be written, attend() when its mask is known. Idempotent per batch.
  void place(std::span<const std::int64_t> cells, std::span<const std::int32_t> positions);
  void attend(std::span<const MaskView> streams);
  // The batch is computed: 16-bit rows that only its own queries needed are let go, so that they do not pile up with the
  // next batch's.
  void batch_end();
  void mark_raw(const ggml_tensor* set_rows);  // stock stores these rows in the plain memory of an undecided buffer
  [[nodiscard]] bool awaits_mask() const { return epoch_open_; }
  // Context shift: rows are rotated layer by layer, in one graph or in slices of it; positions move when all are done.
  void shift_begin(std::span<const std::int32_t> deltas, int n_layers);
  void shift_end();  // also before the next batch, for models that rotate only some layers
  [[nodiscard]] bool shift_complete() const { return shift_layers_ >= static_cast<int>(layers.size()); }
  [[nodiscard]] bool shifting() const { return shift_layers_ != 0; }

  [[nodiscard]] nlohmann::json statistics() const;

  ggml_backend_buffer_t buffer;
  ggml_backend_buffer_i original;  // interface before conversion
  ggml_backend_buffer_type_t original_type;
  void* original_context;
  std::byte* base;
  std::size_t size;

  const Config config;
  Service service = Service::undecided;
  std::vector<std::unique_ptr<CacheTensor>> tensors;
  std::vector<CacheLayer> layers;  // ascending
  std::shared_ptr<const Artifact> artifact;
  Recipe recipe;
  std::vector<LayerCodecs> codecs;  // parallel to layers; empty in exact mode
  std::unique_ptr<KvCache> cache;
  std::vector<std::int64_t> batch_cells;  // of the running batch, in token order
  mutable std::mutex mutex;               // held by hooks, by the graph pass, and while statistics are read

 private:
  void choose();
  void announce() const;
  [[nodiscard]] std::string describe_codec() const;
  [[nodiscard]] std::string describe_int2() const;
  [[nodiscard]] std::unique_ptr<KvCache> make_cache() const;
  [[nodiscard]] std::size_t planned_bytes() const;

  std::map<const void*, CacheTensor*> by_data_;
  SequenceTracker tracker_;
  bool complete_ = false;
  bool epoch_open_ = false;
  bool batch_ended_ = true;
  std::vector<bool> raw_;  // undecided: cells whose nominal memory holds rows of a loaded state
  std::vector<std::int32_t> shift_;
  int shift_layers_ = 0;
};

bool is_cache_name(std::string_view name, bool* is_k, int* layer);

// Interposition of buffers: every new CPU buffer is watched until its first tensor tells what it is.
void watch(ggml_backend_buffer_t buffer);
void install_buffer_type(ggml_backend_buffer_type_t cpu);  // once
ggml_backend_buffer_type_t kv_buffer_type();
KvBuffer* find_buffer(const ggml_tensor* tensor);  // any tensor or view; null: not in a KV buffer of ours
nlohmann::json cache_statistics(bool locked);      // live and freed buffers

}  // namespace oscar::llama

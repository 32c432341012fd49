// What the host sides of append and the attention kernels check alike.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "oscar/base/error.h"
#include "oscar/cuda/decode.h"

namespace oscar::cuda {

inline constexpr int kMostWindow = 1 << 30;   // tokens of sink or recent window: sums of them stay within an int
inline constexpr int kMostColumns = 1 << 25;  // of a page table: every position below 2^31

// A pointer into device memory.
struct Tensor {
  const char* name;
  const void* data;
  std::uintptr_t alignment;
};
inline void check_tensors(const char* what, std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (t.data == nullptr) fail("cuda {}: {} is missing", what, t.name);
    if (reinterpret_cast<std::uintptr_t>(t.data) % t.alignment != 0)
      fail("cuda {}: {} begins at an address that is no multiple of {}", what, t.name, t.alignment);
  }
}

inline void check_layer(const char* what, const LayerView* layer) {
  if (layer == nullptr) fail("cuda {}: the layer's tables are missing", what);
  if (!paged::head_dim_fits(layer->head_dim))
    fail("cuda {}: head_dim is {}; 64, 128 and 256 are possible", what, layer->head_dim);
  if (layer->n_head_kv < 1 || layer->n_head_kv > paged::kMaxHeadsKv)
    fail("cuda {}: {} KV heads; 1 to {} are possible", what, layer->n_head_kv, paged::kMaxHeadsKv);
}

// Of the arguments of any operation. ring_rows: how many recent rows the ring must hold.
template <class Args>
void check_cache(const char* what, const Args& a, int ring_rows) {
  if (a.sink < 0 || a.sink > kMostWindow || a.sink % paged::kBlockTokens != 0)
    fail("cuda {}: a sink of {} tokens; a multiple of {} up to {} is needed", what, a.sink, paged::kBlockTokens, kMostWindow);
  const int least = paged::ring_blocks(ring_rows);
  if (a.ring < least || a.ring > kMostWindow)
    fail("cuda {}: a ring of {} blocks; for {} recent rows {} to {} are possible", what, a.ring, ring_rows, least, kMostWindow);
  if (a.page_columns < 1 || a.page_columns > kMostColumns)
    fail("cuda {}: a page table of {} columns; 1 to {} are possible", what, a.page_columns, kMostColumns);
}

// Of an attention over the last `queries` tokens of a sequence at most, each of which needs its own recent rows in the ring.
template <class Args>
void check_attention(const char* what, const Args& a, int queries) {
  if (a.recent < 1 || a.recent > kMostWindow)
    fail("cuda {}: the window of recent rows is {}; 1 (the query's own token) to {} are possible", what, a.recent, kMostWindow);
  check_cache(what, a, a.recent + queries - 1);
  if (!(a.soft_cap >= 0.0F && a.soft_cap <= 1e30F))
    fail("cuda {}: a soft cap of {}; 0 (none) or more is possible", what, a.soft_cap);
}

}  // namespace oscar::cuda

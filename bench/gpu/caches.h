// Paged caches full of random bytes, for benchmarks of attention kernels.
#pragma once

#include "timing.h"

#include <cstdint>
#include <random>
#include <vector>

#include "oscar/cuda/decode.h"
#include "oscar/paged/page_format.h"
#include "oscar/paged/spectral_pages.h"

namespace oscar::bench {

struct Cache {
  DeviceArray<std::uint8_t> pages;
  DeviceArray<std::uint16_t> blocks;
  DeviceArray<std::int32_t> page_table, block_table;
};

// Slots of each KV head: head_dim, or about it, heads of 3/8 to 13/8 of it.
inline std::vector<int> slots_of_heads(int kv_heads, int head_dim, bool uneven) {
  std::vector<int> slots(static_cast<std::size_t>(kv_heads), head_dim);
  if (!uneven) return slots;
  const int spread[] = {-80, -48, -16, 0, 0, 16, 48, 80};
  for (std::size_t h = 0; h < slots.size(); ++h) slots[h] += spread[h % 8] * head_dim / 128 / 16 * 16;
  return slots;
}

// `count` caches of `batch` sequences with tables of page_columns and block_columns.
inline std::vector<Cache> random_caches(std::size_t count, std::size_t batch, std::size_t page_columns,
                                        std::size_t block_columns, const paged::PageLayout& layout,
                                        const cuda::LayerView& layer) {
  const std::size_t n_pages = batch * page_columns;
  std::mt19937 rng(1);
  std::vector<Cache> caches;
  for (std::size_t i = 0; i < count; ++i) {
    Cache& c = caches.emplace_back();
    c.pages = DeviceArray<std::uint8_t>(n_pages * layout.page_bytes);
    c.blocks = DeviceArray<std::uint16_t>(batch * block_columns * static_cast<std::size_t>(layout.n_head_kv) *
                                          paged::exact_head_values(layout.head_dim));
    fill_words(c.pages.data(), c.pages.size(), i << 40);
    fill_row_data(c.pages.data(), n_pages, layer);
    fill_halves(c.blocks.data(), c.blocks.size(), (i << 40) + 1);
    c.page_table = DeviceArray<std::int32_t>(shuffled(n_pages, rng));
    c.block_table = DeviceArray<std::int32_t>(shuffled(batch * block_columns, rng));
  }
  return caches;
}

}  // namespace oscar::bench

// Random gains of a page, for checks of device kernels.
#pragma once

#include <cstdint>
#include <random>

#include "oscar/paged/spectral_pages.h"

namespace oscar::test {

// Gains about 1 in page `number` of a sequence, some rows nothing but their mean.
inline void fill_gains(const paged::PageLayout& layout, int number, std::uint8_t* page, std::mt19937& rng) {
  const auto pattern = static_cast<unsigned>(number % paged::kPatterns);
  for (int h = 0; h < layout.n_head_kv; ++h) {
    std::uint8_t* gains = page + layout.head_offset[static_cast<std::size_t>(h)] +
                          paged::key_bytes(layout.key_slots[static_cast<std::size_t>(h)]) + paged::value_bytes(layout.head_dim);
    for (int i = 0; i < paged::kPageTokens; ++i) {
      gains[i] = rng() % 50 == 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(116 + rng() % 24);
      gains[paged::kPageTokens + i] =
          rng() % 50 == 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(34 + rng() % 12 + paged::kValueGains * pattern);
    }
  }
}

}  // namespace oscar::test

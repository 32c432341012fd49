// Random contents for benchmarks, made on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "oscar/cuda/decode.h"

namespace oscar::bench {

void fill_words(void* to, std::size_t bytes, std::uint64_t seed);  // any bits
// Gains about 1 without signs, or grids of about such codes.
void fill_row_data(std::uint8_t* pages, std::size_t n_pages, const cuda::LayerView& layer);
void fill_halves(std::uint16_t* to, std::size_t n, std::uint64_t seed);  // uniform binary16 values in (-2, 2)

void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream);  // a multiple of 16 bytes

}  // namespace oscar::bench

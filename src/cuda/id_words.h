// How kernels read a table of ids: as 32-bit words, of a wide id the low one. Ids are below 2^31, or -1: a pool of more pages
// (2.4 TB of the smallest) is on no GPU. So both widths go through the same instructions and registers.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>

#include "oscar/paged/id_table.h"

namespace oscar::cuda {

static_assert(std::endian::native == std::endian::little);

struct IdWords {
  const std::int32_t* words = nullptr;
  int stride = 1;

  IdWords() = default;
  explicit IdWords(const paged::IdTable& table)
      : words(static_cast<const std::int32_t*>(table.ids)), stride(table.wide ? 2 : 1) {}

  // Where the id in a column of a row of `columns` stands; the next one is `stride` words further.
  [[nodiscard]] __device__ __forceinline__ const std::int32_t* at(int row, int columns, int column) const {
    return words + (static_cast<std::int64_t>(row) * columns + column) * stride;
  }
};

}  // namespace oscar::cuda

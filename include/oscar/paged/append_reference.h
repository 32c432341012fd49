// Append of rows to the paged cache as the definition reads, with the CPU codecs: the oracle of the device kernel.
#pragma once

#include <cstdint>

#include "oscar/codec/codec.h"
#include "oscar/paged/id_table.h"
#include "oscar/paged/page_layout.h"

namespace oscar::paged {

// One layer. Pointers are host memory; meaning and layouts as in oscar/cuda/append.h.
struct AppendProblem {
  const PageLayout* layout = nullptr;
  const Codec* keys = nullptr;
  const Codec* values = nullptr;
  int batch = 0;
  int sink = 64;
  const std::uint16_t* k = nullptr;  // binary16 [n_rows, n_head_kv, D]
  const std::uint16_t* v = nullptr;
  const std::int32_t* row_start = nullptr;  // [batch + 1] or null: one row per sequence
  const std::int32_t* lengths = nullptr;    // [batch] after the append
  std::uint8_t* pages = nullptr;
  IdTable page_table;
  int page_columns = 0;
  std::uint16_t* blocks = nullptr;
  IdTable block_table;
  int ring = 0;
};
void append_reference(const AppendProblem& problem);

}  // namespace oscar::paged

// Decode attention on pages as the definition reads: double precision, scalar, no GPU. The oracle of the device kernels.
//   o = sum_t p_t v_t, p = softmax over positions 0 .. n-1 (+ a sink logit); t is read from the tier that Tiers says.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/paged/id_table.h"
#include "oscar/paged/int2_pages.h"
#include "oscar/paged/spectral_pages.h"

namespace oscar::paged {

// One layer, the last `queries` tokens of each sequence. Pointers are host memory; layouts as in oscar/cuda/decode.h.
struct DecodeProblem {
  const SpectralTables* tables = nullptr;  // or, of pages of codec `int2`:
  const Int2Tables* int2_tables = nullptr;
  int batch = 0;
  int group = 1;  // query heads per KV head
  int sink = 64, recent = 256;
  int queries = 1;
  float scale = 1.0F;
  float soft_cap = 0.0F;                  // 0: none; else logit = soft_cap * tanh(scale * q . k / soft_cap)
  const std::uint16_t* q = nullptr;       // binary16 [batch, queries, n_head_kv * group, D]
  const std::int32_t* lengths = nullptr;  // [batch] tokens, the queries' own included
  const std::uint8_t* pages = nullptr;    // [n_pages, page_bytes]
  IdTable page_table;                     // [batch, page_columns] page of positions 64 i ..
  int page_columns = 0;
  const std::uint16_t* blocks = nullptr;  // [n_blocks, n_head_kv, 2, 16, D], see page_format.h
  IdTable block_table;                    // [batch, sink / 16 + ring]
  int ring = 0;
  const float* sinks = nullptr;  // [n_head_kv * group] or null
};

[[nodiscard]] inline const KeyTables& key_tables(const DecodeProblem& problem) {
  if (problem.tables != nullptr) return *problem.tables;
  return *problem.int2_tables;
}

struct DecodeRow {
  std::vector<double> out;  // [D]; zeros where nothing is visible
  double lse = 0;           // natural logarithm of the sum of exponentials; -inf where nothing is visible
};
DecodeRow decode_reference(const DecodeProblem& problem, int sequence, int head, int query = 0);

}  // namespace oscar::paged

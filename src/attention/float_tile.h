// A tile of rows in binary32, exact or decoded: the products of a block's rows with it.
#pragma once

#include <array>
#include <cstdint>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "attention/tile_plan.h"

namespace oscar::attention {

// Exact rows of a tile, one head; null: not read.
using RowPointers = std::array<const std::uint16_t*, kTile>;
// Looks them up and asks memory for all of them at once: rows of one head lie far apart, which the processor's own prefetch
// does not foresee.
void find_exact_rows(const AttentionArgs& args, const TilePlan& plan, bool is_k, int kv_head, int n_head_kv, int dim,
                     RowPointers& rows);

class FloatTile {
 public:
  // Rows that nobody reads become 0, so that whatever their memory holds cannot reach a result; so does padding up to ld.
  void load_exact(const Kernels& kernels, const RowPointers& rows, int dim, int ld);
  void load_codes(const Codec& codec, const AttentionArgs& args, const TilePlan& plan, bool is_k, int kv_head, int dim, int ld);

  // s[r * kTile + j] = q [rows][ld] . row j
  void score(const Kernels& kernels, const float* q, int rows, float* s);
  // out [rows][ld] += p [rows][kTile] x rows
  void add_values(const Kernels& kernels, const float* p, int rows, float* out) const;

 private:
  int ld_ = 0;
  FloatBuffer rows_;    // [kTile][ld]
  FloatBuffer panels_;  // transposed
};

}  // namespace oscar::attention

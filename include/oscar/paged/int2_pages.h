// The `int2` codec on pages (format: page_format.h): static tables that device kernels read, for attention and for coding.
#pragma once

#include <vector>

#include "oscar/codec/int2.h"
#include "oscar/paged/page_layout.h"

namespace oscar::paged {

struct Int2Tables : KeyTables {
  // o = (sum of weights times coded values) * value_output + (sum of weights) * value_mean
  std::vector<MatrixF> value_output;  // per head [D, D]
  MatrixF value_mean;                 // [n_head_kv, D], or empty: none
};

// Throws Error where the codecs do not fit pages: several groups per head, a mean of values before RoPE, or the limits of
// PageLayout.
Int2Tables int2_tables(const Int2Config& keys, const Int2Config& values);

// What coding rows needs. Whoever follows these operations, binary32, each rounded by itself, writes the bytes of the CPU
// codec:
//   keys    x minus means as in encode_tables.h;  values  x -= value_mean
//   y_j = sum_d x_d rotation[d][j] in ascending order of d;  without a rotation y = x
//   t = 65504 or, if that is less, number `rank` (from 0) of |y| in ascending order;  rank -1: 65504
//   y clamped to -t .. t;  lo = binary16(least y, of equal ones the first);  step = binary16((largest y - least y) / 3)
//   code = (y - lo) / step + 0.5, clamped to 0 .. 3 and rounded towards 0;  step = 0: code 0
struct Int2EncodeTables : KeyMeanTables {
  int n_head_kv = 0, head_dim = 0;
  std::vector<MatrixF> key_rotation, value_rotation;  // per head [D, D], or empty: none
  std::vector<int> key_rank, value_rank;              // [n_head_kv]
  MatrixF value_mean;                                 // [n_head_kv, D], zeros where there is none
};

// Throws Error where int2_tables() would.
Int2EncodeTables int2_encode_tables(const Int2Config& keys, const Int2Config& values);

}  // namespace oscar::paged

// The table of an instruction set from its kernels, which differ in types only. Sets that take codes apart where they are
// multiplied replace the two that are null.
#pragma once

#include "attention/kernels.h"

namespace oscar::attention {

template <class Float, class Code>
constexpr Kernels kernel_table(const char* name) {
  return {name,
          Float::widen,
          Float::mask_row,
          Float::dots,
          Float::transpose,
          Float::multiply,
          Float::weighted_sum,
          Float::project,
          Float::mirrored_multiply,
          Float::logits,
          Float::exponentials,
          Code::transpose_words,
          Code::interleave,
          Code::look_up,
          Code::unpack_keys,
          Code::spread,
          Code::key_scores,
          nullptr,
          Code::quantise_weights,
          Code::weigh,
          Code::value_sums,
          nullptr,
          Float::complex_multiply};
}

}  // namespace oscar::attention

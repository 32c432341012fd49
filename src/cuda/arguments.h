// What the host sides of the attention kernels check alike.
#pragma once

#include "oscar/base/error.h"
#include "oscar/paged/page_format.h"

namespace oscar::cuda {

// Windows, soft cap and page table of DecodeArgs or PrefillArgs; rows: how many recent rows the ring must hold.
template <class Args>
void check_cache(const char* what, const Args& a, int rows) {
  if (a.sink < 0 || a.sink % paged::kBlockTokens != 0)
    fail("cuda {}: a sink of {} tokens; a multiple of {} is needed", what, a.sink, paged::kBlockTokens);
  if (a.recent < 1) fail("cuda {}: the window of recent rows is {}; it holds the query's own token at least", what, a.recent);
  if (a.ring < paged::ring_blocks(rows)) fail("cuda {}: a ring of {} blocks does not hold {} recent rows", what, a.ring, rows);
  if (!(a.soft_cap >= 0.0F)) fail("cuda {}: a soft cap of {}; 0 (none) or more is possible", what, a.soft_cap);
  if (a.page_columns < 1) fail("cuda {}: the page table has no columns", what);
}

}  // namespace oscar::cuda

// Rows of a product in blocks whose sums fit into registers. Include it only in files of one instruction set.
#pragma once

#include <algorithm>

namespace oscar::attention {
namespace {

template <int R>
struct Rows {
  static constexpr int value = R;
};

// Calls f(first row, Rows<height>) for blocks of nearly equal height, at most `kMost` and 6: a last block of one row would wait
// for its few sums.
template <int kMost, class F>
void in_row_blocks(int rows, F f) {
  constexpr int kHighest = std::min(kMost, 6);
  const int blocks = (rows + kHighest - 1) / kHighest;
  for (int block = 0, r = 0; block < blocks; ++block) {
    const int height = (rows - r + blocks - block - 1) / (blocks - block);
    const auto with = [&](auto rows_of_block) {
      if constexpr (decltype(rows_of_block)::value <= kHighest) f(r, rows_of_block);
    };
    switch (height) {
      case 6:
        with(Rows<6>{});
        break;
      case 5:
        with(Rows<5>{});
        break;
      case 4:
        with(Rows<4>{});
        break;
      case 3:
        with(Rows<3>{});
        break;
      case 2:
        with(Rows<2>{});
        break;
      default:
        with(Rows<1>{});
        break;
    }
    r += height;
  }
}

}  // namespace
}  // namespace oscar::attention

// Ranges of context depth over which a figure is averaged: an error that grows with depth hides in the mean over all positions.
#pragma once

#include <string>
#include <vector>

namespace oscar::cli {

struct DepthBin {
  int first = 0, end = 0;  // positions first .. end - 1
  [[nodiscard]] int size() const { return end - first; }
  [[nodiscard]] std::string label() const;  // "1024-2047"
};

// Cuts the positions from .. end - 1 at the powers of two. A bin with fewer than `minimum` positions is joined to its neighbour
// below (the lowest: above), so that only a range that is too small as a whole gives a bin that is.
std::vector<DepthBin> depth_bins(int from, int end, int minimum);

}  // namespace oscar::cli

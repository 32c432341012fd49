#include "depth_bins.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar::cli {

std::string DepthBin::label() const { return fmt::format("{}-{}", first, end - 1); }

std::vector<DepthBin> depth_bins(int from, int end, int minimum) {
  if (from < 0 || end <= from) fail("there are no positions from {} to {}", from, end);
  std::vector<DepthBin> bins;
  for (int first = from; first < end;) {
    int power = 1;
    while (power <= first) power *= 2;
    const int last = power < end ? power : end;
    if (!bins.empty() && (last - first < minimum || bins.back().size() < minimum)) {
      bins.back().end = last;
    } else {
      bins.push_back({first, last});
    }
    first = last;
  }
  return bins;
}

}  // namespace oscar::cli

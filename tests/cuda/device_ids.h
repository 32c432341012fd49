// A table of page or block ids on the device, in 32 or 64 bits.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/runtime.h"
#include "oscar/paged/id_table.h"

namespace oscar::test {

// Which tables of a case are wide.
enum class Wide { none, pages, blocks, both };
inline bool wide_pages(Wide w) { return w == Wide::pages || w == Wide::both; }
inline bool wide_blocks(Wide w) { return w == Wide::blocks || w == Wide::both; }

class DeviceIds {
 public:
  // In 32 bits.
  void upload(const std::vector<std::int32_t>& ids) { narrow_.upload(ids); }
  // first: added to all ids but -1.
  DeviceIds(std::vector<std::int32_t> ids, bool wide, std::int32_t first = 0) {
    for (std::int32_t& x : ids) x = x < 0 ? x : x + first;
    if (wide) {
      wide_ = cuda::DeviceArray<std::int64_t>(std::vector<std::int64_t>(ids.begin(), ids.end()));
    } else {
      narrow_ = cuda::DeviceArray<std::int32_t>(ids);
    }
  }
  [[nodiscard]] paged::IdTable table() const {
    return wide_.size() != 0 ? paged::IdTable(wide_.data()) : paged::IdTable(narrow_.data());
  }

 private:
  cuda::DeviceArray<std::int32_t> narrow_;
  cuda::DeviceArray<std::int64_t> wide_;
};

}  // namespace oscar::test

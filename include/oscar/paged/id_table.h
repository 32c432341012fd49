// A table of page or block ids as hosts keep it: 32 bits per id (vLLM's block tables, FlashInfer's page indices) or 64 (SGLang,
// tensors of PyTorch's default integer). -1: there is none. On a device ids are below 2^31.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar::paged {

struct IdTable {
  const void* ids = nullptr;
  bool wide = false;  // std::int64_t, else std::int32_t

  constexpr IdTable() = default;
  constexpr IdTable(std::nullptr_t) {}
  constexpr IdTable(const std::int32_t* narrow) : ids(narrow) {}
  constexpr IdTable(const std::int64_t* wide_ids) : ids(wide_ids), wide(true) {}
  constexpr IdTable(const void* data, bool is_wide) : ids(data), wide(is_wide) {}  // for hosts whose type is a value

  // Of a table in host memory.
  [[nodiscard]] std::int64_t operator[](std::ptrdiff_t i) const {
    return wide ? static_cast<const std::int64_t*>(ids)[i] : static_cast<const std::int32_t*>(ids)[i];
  }
};

}  // namespace oscar::paged

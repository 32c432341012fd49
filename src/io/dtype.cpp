#include "oscar/io/dtype.h"

#include <array>
#include <limits>
#include <utility>

namespace oscar {

std::size_t dtype_size(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, std::size_t>, 15> kSizes = {{{"F64", 8},
                                                                                       {"I64", 8},
                                                                                       {"U64", 8},
                                                                                       {"F32", 4},
                                                                                       {"I32", 4},
                                                                                       {"U32", 4},
                                                                                       {"F16", 2},
                                                                                       {"BF16", 2},
                                                                                       {"I16", 2},
                                                                                       {"U16", 2},
                                                                                       {"I8", 1},
                                                                                       {"U8", 1},
                                                                                       {"BOOL", 1},
                                                                                       {"F8_E4M3", 1},
                                                                                       {"F8_E5M2", 1}}};
  for (const auto& [name, size] : kSizes) {
    if (name == dtype) return size;
  }
  return 0;
}

std::optional<std::uint64_t> checked_bytes(std::span<const std::int64_t> shape, std::size_t element_size) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t bytes = element_size;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      empty = true;  // the other dimensions must still be sane, so keep going with a factor of one
      continue;
    }
    const auto factor = static_cast<std::uint64_t>(dimension);
    if (factor > kMax / bytes) return std::nullopt;
    bytes *= factor;
  }
  return empty ? 0 : bytes;
}

}  // namespace oscar

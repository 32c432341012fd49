// Element types by safetensors' names, shared by all tensor files.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace oscar {

static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian in memory and on disk");

// Bytes per element of "F64", "I64", "U64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16", "I8", "U8", "BOOL", "F8_E4M3",
// "F8_E5M2"; 0 for a type we do not know.
std::size_t dtype_size(std::string_view dtype);

// Product of the dimensions times `element_size`; nullopt when a dimension is negative or the product leaves 63 bits.
std::optional<std::uint64_t> checked_bytes(std::span<const std::int64_t> shape, std::size_t element_size);

}  // namespace oscar

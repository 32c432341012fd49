// safetensors: 8-byte little-endian header length, JSON header, tensor bytes. Strict: sizes must match shapes, tensors must
// tile the data section without holes, overlaps or trailing bytes, keys must be unique, counts are capped by the file size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace oscar {

struct SafeTensor {
  std::string dtype;                // "F32", "F64", "F16", "BF16", "I32", "I64", "U8", ...
  std::vector<std::int64_t> shape;  // row-major
  std::vector<std::byte> bytes;
};

struct SafeTensors {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

SafeTensors read_safetensors(const std::filesystem::path& path);
// Written to a temporary beside `path` and renamed, so a reader never sees half a file.
void write_safetensors(const SafeTensors& file, const std::filesystem::path& path);

// The same for tensors whose bytes need not be in memory together: `write` gives them piece by piece, all in all as many as the
// shape says (Error otherwise, and nothing is written).
using ByteSink = std::function<void(std::span<const std::byte>)>;
struct TensorSource {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::function<void(const ByteSink&)> write;
};
void write_safetensors(std::vector<TensorSource> tensors, const std::map<std::string, std::string>& metadata,
                       const std::filesystem::path& path);

SafeTensor to_tensor(std::span<const float> values, std::vector<std::int64_t> shape);
SafeTensor to_tensor(std::span<const double> values, std::vector<std::int64_t> shape);
// Converts F16/BF16/F32/F64 to the wanted type; Error (naming `what`) for other dtypes.
std::vector<float> to_floats(const SafeTensor& tensor, const std::string& what);
std::vector<double> to_doubles(const SafeTensor& tensor, const std::string& what);

}  // namespace oscar

#include "output_metric.h"

#include <fmt/format.h>

#include <cstring>

#include "ggml.h"
#include "oscar/base/matrix.h"

namespace oscar::cli {

std::vector<float> output_metric(const Gguf& file, const LayerShape& shape) {
  const GgufTensorInfo* info = file.find(fmt::format("blk.{}.attn_output.weight", shape.layer));
  const std::int64_t width = std::int64_t{shape.n_head} * shape.v_dim;
  if (info == nullptr || info->shape.size() != 2 || info->shape[0] != static_cast<std::uint64_t>(width)) return {};
  const auto type = static_cast<ggml_type>(info->type);
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  if (type != GGML_TYPE_F32 && traits->to_float == nullptr) return {};
  const std::vector<std::byte> bytes = file.read(*info);
  const std::size_t row_bytes = ggml_row_size(type, width);
  const auto rows = static_cast<std::int64_t>(info->shape[1]);

  // In slices, so that a large matrix is never held in binary32 as a whole.
  constexpr std::int64_t kSlice = 256;
  std::vector<MatrixF> metric(static_cast<std::size_t>(shape.n_head), MatrixF::Zero(shape.v_dim, shape.v_dim));
  MatrixF slice(kSlice, width);
  for (std::int64_t first = 0; first < rows; first += kSlice) {
    const std::int64_t n = std::min(kSlice, rows - first);
    const std::byte* in = bytes.data() + static_cast<std::size_t>(first) * row_bytes;
    if (type == GGML_TYPE_F32) {
      std::memcpy(slice.data(), in, static_cast<std::size_t>(n) * row_bytes);
    } else {
      traits->to_float(in, slice.data(), n * width);
    }
    for (int h = 0; h < shape.n_head; ++h) {
      const auto part = slice.block(0, std::int64_t{h} * shape.v_dim, n, shape.v_dim);
      metric[static_cast<std::size_t>(h)].noalias() += part.transpose() * part;
    }
  }
  std::vector<float> result;
  for (const MatrixF& m : metric) result.insert(result.end(), m.data(), m.data() + m.size());
  return result;
}

}  // namespace oscar::cli

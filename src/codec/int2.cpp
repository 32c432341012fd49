#include "oscar/codec/int2.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/row_kernels.h"
#include "codec/row_mean.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

constexpr float kMaxInput = 0x1p96F;        // inputs beyond are clamped, so that sums over a head stay finite
constexpr float kMaxRotated = 65504.0F;     // largest binary16: keeps lo and step finite
constexpr double kMaxOrthogonality = 1e-3;  // max |R^T R - I|

static_assert(std::endian::native == std::endian::little, "row bytes are written as little-endian words");

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

bool is_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7F800000U) != 0x7F800000U; }

void store_half(std::uint8_t* out, std::uint16_t half) { std::memcpy(out, &half, sizeof half); }

float load_half(const std::uint8_t* in) {
  std::uint16_t half = 0;
  std::memcpy(&half, in, sizeof half);
  return half_to_float(half);
}

class Int2Codec final : public Codec {
 public:
  explicit Int2Codec(Int2Config config) : config_(std::move(config)) {
    check_config();
    const int dim = config_.head_dim;
    if (config_.group_size == 0) config_.group_size = dim;
    groups_ = (dim + config_.group_size - 1) / config_.group_size;
    head_bytes_ = size_of(dim / 4 + 4 * groups_);
    for (const MatrixF& r : config_.rotation) inverse_.emplace_back(r.transpose());
    if (config_.clip.empty()) config_.clip.assign(1, 0.0F);
    mean_ = RowMean("int2", config_.mean_static, config_.mean_pre_rope, config_.rope, config_.n_head_kv, dim);
  }

  [[nodiscard]] std::string_view name() const override { return "int2"; }
  [[nodiscard]] int n_head_kv() const override { return config_.n_head_kv; }
  [[nodiscard]] int head_dim() const override { return config_.head_dim; }
  [[nodiscard]] std::size_t row_bytes() const override { return size_of(config_.n_head_kv) * head_bytes_; }

  void encode(std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
              EncodeStats& stats) const override {
    check_row(row.size(), out.size());
    const std::size_t dim = size_of(config_.head_dim);
    ++stats.rows;
    if (!std::all_of(row.begin(), row.end(), is_finite)) ++stats.sanitised;
    HeadBuffer turn;
    mean_.turn(position, turn);
    HeadBuffer x;
    HeadBuffer y;
    for (int h = 0; h < config_.n_head_kv; ++h) {
      const float* in = row.data() + size_of(h) * dim;
      for (std::size_t d = 0; d < dim; ++d) x[d] = is_finite(in[d]) ? std::clamp(in[d], -kMaxInput, kMaxInput) : 0.0F;
      mean_.add(h, turn, -1.0F, x);
      rotate(config_.rotation, h, x, y);
      clip_row(std::span(y).first(dim), pick(config_.clip, h), stats);
      encode_head(y.data(), out.data() + size_of(h) * head_bytes_, stats);
    }
  }

  void decode(std::span<const std::uint8_t> code, std::int64_t position, std::span<float> row) const override {
    check_row(row.size(), code.size());
    const std::size_t dim = size_of(config_.head_dim);
    HeadBuffer turn;
    mean_.turn(position, turn);
    HeadBuffer x;
    HeadBuffer y;
    for (int h = 0; h < config_.n_head_kv; ++h) {
      decode_inner(h, code, std::span(y).first(dim));
      rotate(inverse_, h, y, x);
      mean_.add(h, turn, 1.0F, x);
      std::copy_n(x.begin(), dim, row.begin() + h * config_.head_dim);
    }
  }

  void decode_inner(int kv_head, std::span<const std::uint8_t> code, std::span<float> out) const override {
    const std::uint8_t* in = code.data() + size_of(kv_head) * head_bytes_;
    for (int begin = 0; begin < config_.head_dim; begin += config_.group_size) {
      const std::size_t bytes = size_of(std::min(config_.group_size, config_.head_dim - begin)) / 4;
      kernels_.unpack(in, bytes, {load_half(in + bytes), load_half(in + bytes + 2)}, out.data() + begin);
      in += bytes + 4;
    }
  }

  void query_to_inner(int kv_head, std::span<const float> q, std::span<float> inner) const override {
    multiply(config_.rotation, kv_head, q.data(), inner.data());
  }

  void inner_to_output(int kv_head, std::span<const float> inner, double weight, std::span<float> out) const override {
    HeadBuffer x;
    multiply(inverse_, kv_head, inner.data(), x.data());
    const std::size_t dim = size_of(config_.head_dim);
    for (std::size_t d = 0; d < dim; ++d) out[d] += x[d];
    const std::span<const float> mean = mean_.offset(kv_head);
    const auto w = static_cast<float>(weight);
    for (std::size_t d = 0; d < mean.size(); ++d) out[d] += w * mean[d];
  }

  [[nodiscard]] KeyMean key_mean(int kv_head) const override { return mean_.key_mean(kv_head); }

 private:
  // An array of 1 (shared) or n_head_kv entries.
  template <class T>
  static const T& pick(const std::vector<T>& items, int h) {
    return items[items.size() == 1 ? 0 : size_of(h)];
  }

  void check_config() const {
    const Int2Config& c = config_;
    if (c.n_head_kv <= 0) fail("int2: n_head_kv is {}; it must be at least 1", c.n_head_kv);
    if (c.head_dim <= 0 || c.head_dim % 4 != 0 || c.head_dim > kMaxHeadDim) {
      fail("int2: head_dim is {}; it must be a multiple of 4 between 4 and {}", c.head_dim, kMaxHeadDim);
    }
    if (c.group_size < 0 || c.group_size % 4 != 0 || c.group_size > c.head_dim) {
      fail("int2: group_size is {}; it must be 0 (one group per head) or a multiple of 4 up to head_dim {}", c.group_size,
           c.head_dim);
    }
    const auto per_head_or_shared = [&](std::size_t n) { return n == 1 || n == size_of(c.n_head_kv); };
    if (!c.clip.empty() && !per_head_or_shared(c.clip.size())) {
      fail("int2: {} clip ratios for {} KV heads; give one, or one per head", c.clip.size(), c.n_head_kv);
    }
    for (const float clip : c.clip) {
      if (!(clip >= 0.0F && clip <= 1.0F)) fail("int2: clip ratio {} is outside [0, 1]; 0 switches clipping off", clip);
    }
    if (!c.rotation.empty() && !per_head_or_shared(c.rotation.size())) {
      fail("int2: {} rotations for {} KV heads; give one, or one per head", c.rotation.size(), c.n_head_kv);
    }
    for (std::size_t i = 0; i < c.rotation.size(); ++i) check_rotation(c.rotation[i], i);
    if (c.mean_pre_rope.size() != 0 && c.mean_static.size() != 0) {
      fail("int2: both a static and a pre-RoPE mean are given; choose one");
    }
  }

  void check_rotation(const MatrixF& r, std::size_t index) const {
    if (r.rows() != config_.head_dim || r.cols() != config_.head_dim) {
      fail("int2: rotation {} is {} x {}; head_dim is {}", index, r.rows(), r.cols(), config_.head_dim);
    }
    if (!r.allFinite()) fail("int2: rotation {} contains NaN or Inf", index);
    const double error = orthogonality_error(r);
    if (!(error <= kMaxOrthogonality)) {
      fail("int2: rotation {} is not orthogonal (max |R^T R - I| = {:.2g}, allowed {:.0e})", index, error, kMaxOrthogonality);
    }
  }

  void check_row(std::size_t values, std::size_t bytes) const {
    if (values != size_of(config_.n_head_kv) * size_of(config_.head_dim) || bytes != row_bytes()) {
      fail("int2: row of {} values and {} code bytes; expected {} and {}", values, bytes, config_.n_head_kv * config_.head_dim,
           row_bytes());
    }
  }

  void multiply(const std::vector<MatrixF>& matrices, int h, const float* x, float* y) const {
    if (matrices.empty()) {
      std::copy_n(x, config_.head_dim, y);
    } else {
      kernels_.row_times_matrix(x, pick(matrices, h).data(), config_.head_dim, y);
    }
  }
  void rotate(const std::vector<MatrixF>& matrices, int h, const HeadBuffer& x, HeadBuffer& y) const {
    multiply(matrices, h, x.data(), y.data());
  }

  static void clip_row(std::span<float> y, float clip, EncodeStats& stats) {
    const float threshold = std::min(int2_clip_threshold(y, clip), kMaxRotated);
    std::uint32_t clipped = 0;
    for (float& value : y) {
      clipped += static_cast<std::uint32_t>(std::fabs(value) > threshold);
      value = std::clamp(value, -threshold, threshold);
    }
    stats.saturated += clipped;
  }

  void encode_head(const float* y, std::uint8_t* out, EncodeStats& stats) const {
    for (int begin = 0; begin < config_.head_dim; begin += config_.group_size) {
      const std::size_t n = size_of(std::min(config_.group_size, config_.head_dim - begin));
      const auto [low, high] = std::minmax_element(y + begin, y + begin + n);
      const std::uint16_t lo = float_to_half(*low);
      const std::uint16_t step = float_to_half((*high - *low) / 3.0F);
      if (step == 0) {
        std::fill_n(out, n / 4, std::uint8_t{0});
      } else {
        stats.saturated += kernels_.pack(y + begin, n, {half_to_float(step), half_to_float(lo)}, out);
      }
      store_half(out + n / 4, step);
      store_half(out + n / 4 + 2, lo);
      out += n / 4 + 4;
    }
  }

  const RowKernels& kernels_ = row_kernels();
  Int2Config config_;
  std::vector<MatrixF> inverse_;  // transposed rotations
  RowMean mean_;
  int groups_ = 1;
  std::size_t head_bytes_ = 0;  // of one head within a row
};

}  // namespace

float int2_clip_threshold(std::span<const float> rotated_row, float clip) {
  if (clip <= 0.0F || rotated_row.empty()) return std::numeric_limits<float>::infinity();
  const std::size_t n = rotated_row.size();
  HeadBuffer small;
  std::vector<float> large;
  if (n > small.size()) large.resize(n);
  float* magnitude = large.empty() ? small.data() : large.data();
  for (std::size_t i = 0; i < n; ++i) magnitude[i] = std::fabs(rotated_row[i]);
  const std::size_t index = std::min(static_cast<std::size_t>(clip * static_cast<float>(n)), n - 1);
  std::nth_element(magnitude, magnitude + index, magnitude + n);
  return magnitude[index];
}

std::unique_ptr<Codec> make_int2_codec(Int2Config config) { return std::make_unique<Int2Codec>(std::move(config)); }

}  // namespace oscar

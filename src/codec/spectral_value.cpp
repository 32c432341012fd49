// Values of the `spectral` codec; the format is specified in oscar/codec/spectral.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>

#include "codec/gain.h"
#include "codec/row_kernels.h"
#include "codec/row_mean.h"
#include "oscar/base/error.h"
#include "oscar/codec/rates.h"
#include "oscar/codec/spectral.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

constexpr float kMaxInput = 0x1p40F;  // inputs beyond are clamped, so that the energy of a head stays finite

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// One run of coordinates of equal width.
struct Run {
  int width = 0;
  float inverse_step = 0, unit = 0;  // code c stands for (c - centre) * unit
  std::array<float, 8> level{};      // unit * (c - centre)
};

Run make_run(int width) {
  Run run;
  run.width = width;
  const GaussianGrid& grid = kGaussianGrid[size_of(width)];
  run.inverse_step = 1.0F / grid.step;
  run.unit = grid.unit();
  for (int c = 0; c < (1 << width); ++c) {
    run.level[size_of(c)] = run.unit * (static_cast<float>(c) - static_cast<float>((1 << width) - 1) / 2.0F);
  }
  return run;
}

// H is its own transpose. One copy for all layers, so that it stays in the cache of a processor that goes through them.
std::shared_ptr<const MatrixF> shared_hadamard(int dim) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<const MatrixF>> known;
  const std::lock_guard lock(mutex);
  std::shared_ptr<const MatrixF> h = known[dim].lock();
  if (h == nullptr) {
    h = std::make_shared<const MatrixF>(hadamard(dim).cast<float>());
    known[dim] = h;
  }
  return h;
}

class SpectralValueCodec final : public Codec {
 public:
  explicit SpectralValueCodec(SpectralValueConfig config) : n_head_kv_(config.n_head_kv), head_dim_(config.head_dim) {
    if (n_head_kv_ <= 0) fail("spectral: n_head_kv is {}; it must be at least 1", n_head_kv_);
    if (head_dim_ <= 0 || head_dim_ % 16 != 0 || head_dim_ > kMaxHeadDim) {
      fail("spectral: head_dim of V is {}; it must be a multiple of 16 up to {}", head_dim_, kMaxHeadDim);
    }
    if (!is_rate(config.bits)) fail("spectral: {} bits for V are not {}", config.bits, rate_names());
    const int both = static_cast<int>(config.bits * 2);
    runs_[0] = make_run((both + 1) / 2);
    runs_[1] = make_run(both / 2);
    for (const Run& run : runs_) {
      if (run.width >= 2) digits_ += head_dim_ / 2;
      if (run.width % 2 == 1) singles_ += head_dim_ / 2;
    }
    head_bytes_ = size_of(digits_) / 4 + size_of(singles_) / 8;
    if (config.signs.rows() != n_head_kv_ || config.signs.cols() != head_dim_ || !(config.signs.array().abs() == 1.0F).all()) {
      fail("spectral: V needs signs [{}, {}] of +1 and -1", n_head_kv_, head_dim_);
    }
    if (config.scale.size() != size_of(n_head_kv_) ||
        !std::all_of(config.scale.begin(), config.scale.end(), [](float s) { return s > 0.0F && std::isfinite(s); })) {
      fail("spectral: V needs {} positive scales", n_head_kv_);
    }
    scale_ = std::move(config.scale);
    for (int head = 0; head < n_head_kv_; ++head) forms_.push_back(make_form(head));
    signs_.resize(kSignPatterns * n_head_kv_, head_dim_);
    for (int p = 0; p < kSignPatterns; ++p) {
      for (int h = 0; h < n_head_kv_; ++h) {
        for (int d = 0; d < head_dim_; ++d) signs_(p * n_head_kv_ + h, d) = config.signs(h, d) * value_flip(p, d);
      }
    }
    for (int d = 0; d < head_dim_; ++d) {
      inverse_step_.push_back(run_of(d).inverse_step);
      half_levels_.push_back(0.5F * static_cast<float>(1 << run_of(d).width));
    }
    hadamard_ = shared_hadamard(head_dim_);
  }

  [[nodiscard]] std::string_view name() const override { return "spectral"; }
  [[nodiscard]] int n_head_kv() const override { return n_head_kv_; }
  [[nodiscard]] int head_dim() const override { return head_dim_; }
  [[nodiscard]] std::size_t row_bytes() const override { return size_of(n_head_kv_) * (head_bytes_ + 1); }

  void encode(std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
              EncodeStats& stats) const override {
    encode_part(0, 1, row, position, out, stats);
  }

  void encode_part(int part, int parts, std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
                   EncodeStats& stats) const override {
    const int pattern = value_pattern(position);
    check_row(row.size(), out.size());
    const std::size_t dim = size_of(head_dim_);
    if (part == 0) {
      ++stats.rows;
      if (!std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) ++stats.sanitised;
    }
    HeadBuffer x;
    for (int h = n_head_kv_ * part / parts; h < n_head_kv_ * (part + 1) / parts; ++h) {
      const float* in = row.data() + size_of(h) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        x[d] = std::isfinite(in[d]) ? std::clamp(in[d], -kMaxInput, kMaxInput) * sign(pattern, h, d) : 0.0F;
      }
      const int gain = encode_head(h, x, out.data() + size_of(h) * head_bytes_, stats);
      out[gain_offset(h)] = static_cast<std::uint8_t>(gain == 0 ? 0 : gain + (pattern << kGainBits));
    }
  }

  void decode(std::span<const std::uint8_t> code, std::int64_t /*position*/, std::span<float> row) const override {
    check_row(row.size(), code.size());
    const std::size_t dim = size_of(head_dim_);
    for (int h = 0; h < n_head_kv_; ++h) decode_inner(h, code, row.subspan(size_of(h) * dim, dim));
  }

  void decode_inner(int kv_head, std::span<const std::uint8_t> code, std::span<float> out) const override {
    HeadBuffer y;
    decode_basis(kv_head, code, y.data());
    std::fill(out.begin(), out.end(), 0.0F);
    basis_to_output(kv_head, code[gain_offset(kv_head)] >> kGainBits, std::span(y).first(out.size()), out);
  }

  void query_to_inner(int /*kv_head*/, std::span<const float> /*q*/, std::span<float> /*inner*/) const override {
    fail("spectral: a value codec has no query");
  }

  void inner_to_output(int /*kv_head*/, std::span<const float> inner, double /*weight*/, std::span<float> out) const override {
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += inner[d];
  }

  void basis_to_output(int kv_head, int basis, std::span<const float> sum, std::span<float> out) const override {
    HeadBuffer x;
    std::copy(sum.begin(), sum.end(), x.begin());
    hadamard_in_place(x.data(), head_dim_);
    for (std::size_t d = 0; d < size_of(head_dim_); ++d) out[d] += x[d] * sign(basis, kv_head, d);
  }

  [[nodiscard]] const CodeForm* code_form(int kv_head) const override { return &forms_[size_of(kv_head)]; }

  [[nodiscard]] KeyMean key_mean(int /*kv_head*/) const override { return {}; }

 private:
  static constexpr int kGainBits = 6;

  // In the basis of the row's pattern; out: [head_dim].
  void decode_basis(int kv_head, std::span<const std::uint8_t> code, float* out) const {
    const std::uint8_t* digits = code.data() + size_of(kv_head) * head_bytes_;
    const std::uint8_t* singles = digits + digits_ / 4;
    const float gain = forms_[size_of(kv_head)].gain[code[gain_offset(kv_head)]];
    if (singles_ == 0) {
      const Run& run = runs_[0];
      const float step = gain * run.unit;
      kernels_.unpack(digits, size_of(digits_) / 4, {step, -1.5F * step}, out);
      return;
    }
    int digit = 0;
    int single = 0;
    for (int d = 0; d < head_dim_; ++d) {
      const Run& run = run_of(d);
      unsigned c = 0;
      if (run.width >= 2) {
        c = (static_cast<unsigned>(digits[digit / 4]) >> (2 * (digit % 4))) & 3U;
        ++digit;
      }
      if (run.width % 2 == 1) {
        const unsigned bit = (static_cast<unsigned>(singles[single / 8]) >> (single % 8)) & 1U;
        c |= bit << (run.width - 1);
        ++single;
      }
      out[d] = gain * run.level[c];
    }
  }

  [[nodiscard]] CodeForm make_form(int head) const {
    CodeForm form;
    const std::size_t digits = size_of(head) * head_bytes_;
    const std::size_t singles = digits + size_of(digits_) / 4;
    // Digits and singles of the first half come first, so a half's planes start where those of the half before end.
    if (digits_ > 0) form.planes.push_back({digits, 0, digits_, 2, 0});
    int single = 0;
    for (int half = 0; half < 2; ++half) {
      const int width = runs_[size_of(half)].width;
      if (width % 2 == 0) continue;
      form.planes.push_back({singles + size_of(single) / 8, half * head_dim_ / 2, head_dim_ / 2, 1, width - 1});
      single += head_dim_ / 2;
    }
    form.coded = head_dim_;
    for (int d = 0; d < head_dim_; ++d) {
      form.centre.push_back(static_cast<float>((1 << run_of(d).width) - 1) / 2.0F);
      form.unit.push_back(run_of(d).unit);
    }
    form.gain_offset = gain_offset(head);
    for (std::size_t n = 0; n < form.gain.size(); ++n) {
      form.gain[n] = scale_[size_of(head)] * ValueGain::table().decode(static_cast<int>(n % ValueGain::kSize));
    }
    form.bases = kSignPatterns;
    form.basis_shift = kGainBits;
    return form;
  }
  void pack(const std::array<std::uint8_t, kMaxHeadDim>& codes, std::uint8_t* out) const {
    // Digits come of the first digits_ coordinates: a half without any is the second.
    for (std::size_t i = 0; i < size_of(digits_); i += 4) {
      unsigned byte = 0;
      for (std::size_t j = 0; j < 4; ++j) byte |= (codes[i + j] & 3U) << (2 * j);
      out[i / 4] = static_cast<std::uint8_t>(byte);
    }
    std::uint8_t* singles = out + digits_ / 4;
    for (int half = 0; half < 2; ++half) {
      const int width = runs_[size_of(half)].width;
      if (width % 2 == 0) continue;
      const std::uint8_t* from = codes.data() + half * head_dim_ / 2;
      for (int i = 0; i < head_dim_ / 2; i += 8, ++singles) {
        unsigned byte = 0;
        for (int j = 0; j < 8; ++j) byte |= ((static_cast<unsigned>(from[i + j]) >> (width - 1)) & 1U) << j;
        *singles = static_cast<std::uint8_t>(byte);
      }
    }
  }

  [[nodiscard]] float sign(int pattern, int head, std::size_t d) const {
    return signs_.data()[size_of((pattern * n_head_kv_ + head) * head_dim_) + d];
  }
  [[nodiscard]] std::size_t gain_offset(int head) const { return size_of(n_head_kv_) * head_bytes_ + size_of(head); }
  [[nodiscard]] const Run& run_of(int d) const { return runs_[d < head_dim_ / 2 ? 0 : 1]; }

  void check_row(std::size_t values, std::size_t bytes) const {
    if (values != size_of(n_head_kv_) * size_of(head_dim_) || bytes != row_bytes()) {
      fail("spectral: row of {} values and {} code bytes; expected {} and {}", values, bytes, n_head_kv_ * head_dim_,
           row_bytes());
    }
  }

  // x: signs applied. Returns the gain.
  int encode_head(int h, const HeadBuffer& x, std::uint8_t* out, EncodeStats& stats) const {
    HeadBuffer y;
    kernels_.row_times_matrix(x.data(), hadamard_->data(), head_dim_, y.data());
    std::fill_n(out, head_bytes_, std::uint8_t{0});
    float energy = 0.0F;
    for (std::size_t d = 0; d < size_of(head_dim_); ++d) energy += y[d] * y[d];
    const float inverse_rms = std::sqrt(static_cast<float>(head_dim_) / energy);
    if (!(energy > 0.0F) || !std::isfinite(inverse_rms)) return 0;  // nothing, or too little for binary32
    std::array<std::uint8_t, kMaxHeadDim> codes;
    stats.saturated +=
        kernels_.quantise(y.data(), inverse_rms, {inverse_step_.data(), half_levels_.data()}, size_of(head_dim_), codes.data());
    float product = 0.0F;
    for (int d = 0; d < head_dim_; ++d) product += y[size_of(d)] * inverse_rms * run_of(d).level[size_of(codes[size_of(d)])];
    pack(codes, out);
    // product > 0: a value and its code have the same sign. g = |y|^2 / <y, zh> = |y| sqrt(D) / <u, zh>.
    const float gain = static_cast<float>(head_dim_) / (inverse_rms * product);
    bool clamped = false;
    const int n = ValueGain::table().encode(gain / scale_[size_of(h)], clamped);
    stats.saturated += static_cast<std::uint64_t>(clamped);
    return n;
  }

  const RowKernels& kernels_ = row_kernels();
  int n_head_kv_ = 0, head_dim_ = 0;
  std::array<Run, 2> runs_;
  int digits_ = 0, singles_ = 0;  // of a head
  std::size_t head_bytes_ = 0;
  std::vector<float> scale_;
  std::vector<CodeForm> forms_;
  MatrixF signs_;                                  // [kSignPatterns * n_head_kv, D]
  std::vector<float> inverse_step_, half_levels_;  // [D]
  std::shared_ptr<const MatrixF> hadamard_;
};

}  // namespace

std::unique_ptr<Codec> make_spectral_value_codec(SpectralValueConfig config) {
  return std::make_unique<SpectralValueCodec>(std::move(config));
}

}  // namespace oscar

// Keys of the `spectral` codec; the format is specified in oscar/codec/spectral.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "codec/digits.h"
#include "codec/gain.h"
#include "codec/row_kernels.h"
#include "codec/row_mean.h"
#include "oscar/base/error.h"
#include "oscar/codec/spectral.h"

namespace oscar {
namespace {

constexpr float kMaxInput = 0x1p40F;  // inputs beyond are clamped, so that sums of squares over a head stay finite
constexpr double kMaxInverseError = 1e-2;

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// A head with its coordinates in stored order.
struct Head {
  MatrixF transform;                 // [D, D]: z = x * transform
  MatrixF inverse;                   // [D, D]: x^ = (zh step g) * inverse
  MatrixF query;                     // [D, D]: inner query = q * query, steps included
  std::vector<int> width;            // [D] non-increasing
  std::vector<float> step;           // [coded]
  std::vector<float> inverse_step;   // [padded]
  std::vector<float> half_levels;    // [padded] 2^(width - 1)
  std::vector<float> weight;         // [padded] step^2
  std::vector<float> inverse_sigma;  // [D]
  int norm_count = 0;
  int coded = 0;           // coordinates of width > 0
  std::size_t padded = 0;  // the same up to whole blocks of kGainBlock
  DigitLayout digits;
  std::size_t offset = 0;  // of its digits in a row
  CodeForm form;
};

// The head's digits from row[offset] on; the gain byte's place is added when all heads are known. Steps are in the query.
CodeForm make_form(const DigitLayout& digits, std::size_t offset) {
  CodeForm form;
  form.coded = static_cast<int>(digits.count[0]);
  form.centre = digits.centre;
  form.unit.assign(digits.count[0], 1.0F);
  for (std::size_t l = 0; l < kMaxDigits && digits.count[l] > 0; ++l) {
    form.planes.push_back({offset + digits.offset[l], 0, static_cast<int>(digits.count[l]), 2, static_cast<int>(2 * l)});
  }
  for (std::size_t n = 0; n < form.gain.size(); ++n) form.gain[n] = KeyGain::table().decode(static_cast<int>(n));
  return form;
}

void check_head(const SpectralKeyHead& head, int dim, int number) {
  const auto wrong = [&](std::string_view what) { fail("spectral: head {}: {}", number, what); };
  const auto n = size_of(dim);
  for (const MatrixF* m : {&head.transform, &head.inverse}) {
    if (m->rows() != dim || m->cols() != dim)
      wrong(fmt::format("a transform is {} x {}; head_dim is {}", m->rows(), m->cols(), dim));
    if (!m->allFinite()) wrong("a transform contains NaN or Inf");
  }
  if (head.width.size() != n || head.step.size() != n || head.inverse_sigma.size() != n) {
    wrong(fmt::format("widths, steps and sigmas must have {} entries each", dim));
  }
  int digits = 0;
  for (std::size_t d = 0; d < n; ++d) {
    const int width = head.width[d];
    if (width < 0 || width > kSpectralMaxWidth || width % 2 != 0) wrong(fmt::format("width {} is not 0, 2, 4, 6 or 8", width));
    if (width != head.width[d / kSpectralQuad * kSpectralQuad]) wrong("the coordinates of a quad have different widths");
    if (width > 0 && !(head.step[d] > 0.0F && std::isfinite(head.step[d]))) wrong("a step is not positive and finite");
    if (!(head.inverse_sigma[d] >= 0.0F && std::isfinite(head.inverse_sigma[d]))) wrong("a sigma is not positive and finite");
    digits += width / 2;
  }
  if (digits % kSpectralSlots != 0) wrong(fmt::format("{} digits are not a multiple of {}", digits, kSpectralSlots));
  const MatrixD product = head.transform.cast<double>() * head.inverse.cast<double>();
  const double error = (product - MatrixD::Identity(dim, dim)).cwiseAbs().maxCoeff();
  if (!(error <= kMaxInverseError)) {
    wrong(fmt::format("its inverse transform is not the inverse (max |T T^-1 - I| = {:.2g}, allowed {:.0e})", error,
                      kMaxInverseError));
  }
  const double spread = head.transform.cast<double>().norm() * head.inverse.cast<double>().norm() / dim;
  if (!(spread <= kSpectralMaxSpread)) {
    wrong(fmt::format("its transform is ill-conditioned (|T| |T^-1| / D = {:.3g}, allowed {})", spread, kSpectralMaxSpread));
  }
}

Head stored_order(const SpectralKeyHead& in, int dim) {
  std::vector<int> order(size_of(dim));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return in.width[size_of(a)] > in.width[size_of(b)]; });
  Head head;
  head.transform.resize(dim, dim);
  head.inverse.resize(dim, dim);
  head.query = MatrixF::Zero(dim, dim);
  for (int d = 0; d < dim; ++d) {
    const int from = order[size_of(d)];
    head.transform.col(d) = in.transform.col(from);
    head.inverse.row(d) = in.inverse.row(from);
    head.width.push_back(in.width[size_of(from)]);
    head.inverse_sigma.push_back(in.inverse_sigma[size_of(from)]);
    head.norm_count += static_cast<int>(head.inverse_sigma.back() > 0.0F);
    if (head.width.back() == 0) continue;
    const float step = in.step[size_of(from)];
    head.step.push_back(step);
    head.inverse_step.push_back(1.0F / step);
    head.half_levels.push_back(0.5F * static_cast<float>(1 << head.width.back()));
    head.weight.push_back(step * step);
    head.query.col(d) = (step * in.inverse.row(from)).transpose();
    ++head.coded;
  }
  head.padded = (size_of(head.coded) + kGainBlock - 1) / kGainBlock * kGainBlock;
  head.inverse_step.resize(head.padded, 0.0F);
  head.half_levels.resize(head.padded, 0.5F);
  head.weight.resize(head.padded, 0.0F);
  head.digits = DigitLayout(head.width);
  return head;
}

class SpectralKeyCodec final : public Codec {
 public:
  explicit SpectralKeyCodec(SpectralKeyConfig config) : n_head_kv_(config.n_head_kv), head_dim_(config.head_dim) {
    if (n_head_kv_ <= 0) fail("spectral: n_head_kv is {}; it must be at least 1", n_head_kv_);
    if (head_dim_ <= 0 || head_dim_ % kSpectralQuad != 0 || head_dim_ > kMaxHeadDim) {
      fail("spectral: head_dim is {}; it must be a multiple of {} up to {}", head_dim_, kSpectralQuad, kMaxHeadDim);
    }
    if (config.heads.size() != size_of(n_head_kv_)) {
      fail("spectral: {} heads are described; n_head_kv is {}", config.heads.size(), n_head_kv_);
    }
    for (int h = 0; h < n_head_kv_; ++h) {
      check_head(config.heads[size_of(h)], head_dim_, h);
      Head& head = heads_.emplace_back(stored_order(config.heads[size_of(h)], head_dim_));
      head.offset = gains_;
      head.form = make_form(head.digits, head.offset);
      gains_ += head.digits.bytes;
    }
    for (int h = 0; h < n_head_kv_; ++h) heads_[size_of(h)].form.gain_offset = gains_ + size_of(h);
    mean_ = RowMean("spectral", std::move(config.mean), std::move(config.mean_pre_rope), std::move(config.rope), n_head_kv_,
                    head_dim_);
  }

  [[nodiscard]] std::string_view name() const override { return "spectral"; }
  [[nodiscard]] int n_head_kv() const override { return n_head_kv_; }
  [[nodiscard]] int head_dim() const override { return head_dim_; }
  [[nodiscard]] std::size_t row_bytes() const override { return gains_ + size_of(n_head_kv_); }

  void encode(std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
              EncodeStats& stats) const override {
    encode_part(0, 1, row, position, out, stats);
  }

  void encode_part(int part, int parts, std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
                   EncodeStats& stats) const override {
    check_row(row.size(), out.size());
    const std::size_t dim = size_of(head_dim_);
    if (part == 0) {
      ++stats.rows;
      if (!std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) ++stats.sanitised;
    }
    HeadBuffer turn;
    mean_.turn(position, turn);
    HeadBuffer x;
    for (int h = n_head_kv_ * part / parts; h < n_head_kv_ * (part + 1) / parts; ++h) {
      const float* in = row.data() + size_of(h) * dim;
      for (std::size_t d = 0; d < dim; ++d) x[d] = std::isfinite(in[d]) ? std::clamp(in[d], -kMaxInput, kMaxInput) : 0.0F;
      mean_.add(h, turn, -1.0F, x);
      const Head& head = heads_[size_of(h)];
      out[gains_ + size_of(h)] = encode_head(head, x, out.data() + head.offset, stats);
    }
  }

  void decode(std::span<const std::uint8_t> code, std::int64_t position, std::span<float> row) const override {
    check_row(row.size(), code.size());
    const std::size_t dim = size_of(head_dim_);
    HeadBuffer turn;
    mean_.turn(position, turn);
    HeadBuffer z;
    HeadBuffer x;
    for (int h = 0; h < n_head_kv_; ++h) {
      const Head& head = heads_[size_of(h)];
      decode_inner(h, code, std::span(z).first(dim));
      for (std::size_t d = 0; d < size_of(head.coded); ++d) z[d] *= head.step[d];
      kernels_.row_times_matrix(z.data(), head.inverse.data(), head_dim_, x.data());
      mean_.add(h, turn, 1.0F, x);
      std::copy_n(x.begin(), dim, row.begin() + h * head_dim_);
    }
  }

  void decode_inner(int kv_head, std::span<const std::uint8_t> code, std::span<float> out) const override {
    const Head& head = heads_[size_of(kv_head)];
    const float gain = KeyGain::table().decode(code[gains_ + size_of(kv_head)]);
    digits_.unpack(head.digits, code.data() + head.offset, gain, out.data());
    std::fill(out.begin() + head.coded, out.end(), 0.0F);
  }

  void query_to_inner(int kv_head, std::span<const float> q, std::span<float> inner) const override {
    kernels_.row_times_matrix(q.data(), heads_[size_of(kv_head)].query.data(), head_dim_, inner.data());
  }

  [[nodiscard]] const float* query_matrix(int kv_head) const override { return heads_[size_of(kv_head)].query.data(); }

  void inner_to_output(int /*kv_head*/, std::span<const float> /*inner*/, double /*weight*/,
                       std::span<float> /*out*/) const override {
    fail("spectral: a key codec has no output");
  }

  [[nodiscard]] const CodeForm* code_form(int kv_head) const override { return &heads_[size_of(kv_head)].form; }

  [[nodiscard]] KeyMean key_mean(int kv_head) const override { return mean_.key_mean(kv_head); }

 private:
  void check_row(std::size_t values, std::size_t bytes) const {
    if (values != size_of(n_head_kv_) * size_of(head_dim_) || bytes != row_bytes()) {
      fail("spectral: row of {} values and {} code bytes; expected {} and {}", values, bytes, n_head_kv_ * head_dim_,
           row_bytes());
    }
  }

  // The gain byte of least cost; z [padded], `energy` its sum of squares.
  [[nodiscard]] std::uint8_t choose_gain(const Head& head, const HeadBuffer& z, float energy, int centre) const {
    int best = centre;
    float least = std::numeric_limits<float>::infinity();
    const auto attempt = [&](int byte) {
      if (byte < 1 || byte > 255) return;
      const float gain = KeyGain::table().decode(byte);
      const float scale = 1.0F / gain;
      const GainError e = kernels_.gain_error(z.data(), scale, {head.inverse_step.data(), head.half_levels.data()},
                                              head.weight.data(), head.padded);
      const float radial = kRadialCost * e.radial * (e.radial / (energy * scale * scale));
      const float cost = (e.error + radial) * (gain * gain);
      if (!(cost < least)) return;
      least = cost;
      best = byte;
    };
    for (int k = kGainFirst; k <= kGainLast; k += kGainStride) attempt(centre + k);
    const int middle = best;
    for (int k = -kGainFine; k <= kGainFine; ++k) {
      if (k != 0) attempt(middle + k);
    }
    return static_cast<std::uint8_t>(best);
  }

  // Digits to `out`, the gain byte returned.
  std::uint8_t encode_head(const Head& head, const HeadBuffer& x, std::uint8_t* out, EncodeStats& stats) const {
    HeadBuffer z;
    kernels_.row_times_matrix(x.data(), head.transform.data(), head_dim_, z.data());
    float squares = 0.0F;
    for (std::size_t d = 0; d < size_of(head_dim_); ++d) {
      const float r = z[d] * head.inverse_sigma[d];
      squares += r * r;
    }
    std::fill(z.begin() + head.coded, z.begin() + static_cast<std::ptrdiff_t>(head.padded), 0.0F);
    const float energy = sum_of_squares(z.data(), head.padded);
    if (!(energy > 0.0F) || !std::isfinite(energy) || !std::isfinite(squares)) {  // the row decodes to its mean
      if (energy != 0.0F) ++stats.saturated;
      std::fill_n(out, head.digits.bytes, std::uint8_t{0});
      return 0;
    }
    const float norm = std::max(kSpectralMinNorm, std::sqrt(squares / static_cast<float>(std::max(1, head.norm_count))));
    bool clamped = false;
    const int centre = KeyGain::table().encode(norm, clamped);
    const std::uint8_t gain = choose_gain(head, z, energy, centre);
    std::array<std::uint8_t, kMaxHeadDim> codes;
    stats.saturated +=
        kernels_.quantise(z.data(), 1.0F / KeyGain::table().decode(gain), {head.inverse_step.data(), head.half_levels.data()},
                          size_of(head.coded), codes.data());
    stats.saturated += static_cast<std::uint64_t>(clamped);
    pack_digits(head.digits, codes.data(), out);
    return gain;
  }

  const RowKernels& kernels_ = row_kernels();
  const DigitKernels& digits_ = digit_kernel_sets().front();
  int n_head_kv_ = 0, head_dim_ = 0;
  std::vector<Head> heads_;
  std::size_t gains_ = 0;  // offset of the gain bytes
  RowMean mean_;
};

}  // namespace

MidRise mid_rise(float y, int width) {
  const int levels = 1 << width;
  const float t = y + 0.5F * static_cast<float>(levels);
  if (!(t >= 0.0F)) return {0, true};
  if (t >= static_cast<float>(levels)) return {levels - 1, true};
  return {static_cast<int>(t), false};  // not negative: truncation is floor
}

std::unique_ptr<Codec> make_spectral_key_codec(SpectralKeyConfig config) {
  return std::make_unique<SpectralKeyCodec>(std::move(config));
}

}  // namespace oscar

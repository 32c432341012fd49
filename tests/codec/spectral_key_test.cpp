#include "codec/spectral_rows.h"

namespace oscar {
namespace {

using test::all_finite;
using test::decode;
using test::dot;
using test::encode;
using test::gaussian;
using test::kGaussianDistortion;
using test::kHeadSizes;
using test::kInf;
using test::kNan;
using test::matrix_of;
using test::plain_head;
using test::random_head;
using test::relative_error;
using test::rope_of;
using test::round_trip;
using test::size_of;

SpectralKeyConfig config_of(std::vector<SpectralKeyHead> heads) {
  SpectralKeyConfig config;
  config.n_head_kv = static_cast<int>(heads.size());
  config.head_dim = static_cast<int>(heads.front().transform.rows());
  config.heads = std::move(heads);
  return config;
}

SpectralKeyConfig random_config(int heads, int dim) {
  std::vector<SpectralKeyHead> list;
  for (int h = 0; h < heads; ++h) list.push_back(random_head(dim, 100U * static_cast<unsigned>(h + dim)));
  return config_of(std::move(list));
}

// What spectral.h says about the bytes of one head, without the codec: codes in T's order and the gain byte.
struct HeadCode {
  std::vector<int> codes;  // [D], 0 where nothing is stored
  int gain = 0;
};

HeadCode read_head(const SpectralKeyConfig& config, int head, const std::vector<std::uint8_t>& row) {
  std::size_t at = 0;
  for (int h = 0; h < head; ++h) {
    for (const int width : config.heads[size_of(h)].width) at += size_of(width);
  }
  at /= 8;
  const std::vector<int>& width = config.heads[size_of(head)].width;
  std::vector<std::size_t> order;  // stored order: by descending width, equal widths in T's order
  for (int w = 8; w > 0; w -= 2) {
    for (std::size_t d = 0; d < width.size(); ++d) {
      if (width[d] == w) order.push_back(d);
    }
  }
  HeadCode code;
  code.codes.assign(width.size(), 0);
  for (int level = 0; level < 4; ++level) {
    std::size_t digit = 0;
    for (; digit < order.size() && width[order[digit]] > 2 * level; ++digit) {
      code.codes[order[digit]] += ((row[at + digit / 4] >> (2 * (digit % 4))) & 3) << (2 * level);
    }
    at += digit / 4;
  }
  code.gain = row[row.size() - config.heads.size() + size_of(head)];
  return code;
}

double gain_of(int byte) { return std::pow(2.0, (byte - 128) / 16.0); }

// What coding z with one gain comes to by spectral.h, in double. Nearer than kNearEdge to the edge between two codes, binary32
// may take either. The squared error hardly depends on which, the share along the row does: the cost is an interval.
constexpr double kNearEdge = 1e-3;
struct Coding {
  double low = 0, high = 0;                   // of the cost
  double error = 0, energy = 0, product = 0;  // |e|^2, |z|^2 and <z, z^> over the coded coordinates
};

Coding coding(const SpectralKeyHead& head, const VectorD& z, double gain) {
  Coding c;
  double along = 0;
  double either = 0;
  for (std::size_t d = 0; d < head.width.size(); ++d) {
    if (head.width[d] == 0) continue;
    const double half = std::pow(2.0, head.width[d] - 1);
    const double step = gain * static_cast<double>(head.step[d]);
    const double value = z[static_cast<Eigen::Index>(d)];
    const double y = value / step;
    const double decoded = step * (std::clamp(std::floor(y + half), 0.0, 2 * half - 1) - half + 0.5);
    c.error += (decoded - value) * (decoded - value);
    c.energy += value * value;
    c.product += value * decoded;
    along += value * (decoded - value);
    if (std::abs(y - std::round(y)) < kNearEdge && std::abs(y) < half) either += std::abs(value * step);
  }
  const double least = std::max(0.0, std::abs(along) - either);
  const double most = std::abs(along) + either;
  c.low = c.error + 4 * least * least / c.energy;
  c.high = c.error + 4 * most * most / c.energy;
  return c;
}

// Whether the encoder's search around g0 can end at `byte`: costs closer than the rounding of binary32 may come in any order.
bool search_may_end_at(int byte, const SpectralKeyHead& head, const VectorD& z, double g0) {
  constexpr double kRounding = 1 + 1e-4;
  const auto lowest = [&](int n) { return coding(head, z, gain_of(n)).low; };
  const auto least_of = [&](const std::vector<int>& bytes) {
    double least = std::numeric_limits<double>::infinity();
    for (const int n : bytes) least = std::min(least, coding(head, z, gain_of(n)).high);
    return kRounding * least;
  };
  const auto in_range = [](int first, int last, int stride) {
    std::vector<int> bytes;
    for (int n = first; n <= last; n += stride) {
      if (n >= 1 && n <= 255) bytes.push_back(n);
    }
    return bytes;
  };
  const double exact = std::clamp(128 + 16 * std::log2(g0), 1.0, 255.0);
  for (const int n0 : {static_cast<int>(std::floor(exact + 0.499)), static_cast<int>(std::floor(exact + 0.501))}) {
    const std::vector<int> coarse = in_range(n0 - 16, n0 + 12, 4);
    const double least = least_of(coarse);
    for (const int middle : coarse) {
      if (lowest(middle) > least) continue;
      const std::vector<int> fine = in_range(middle - 2, middle + 2, 1);
      if (std::find(fine.begin(), fine.end(), byte) != fine.end() && lowest(byte) <= least_of(fine)) return true;
    }
  }
  return false;
}

double norm_of(const SpectralKeyHead& head, const VectorD& z) {
  double squares = 0;
  int counted = 0;
  for (std::size_t d = 0; d < head.inverse_sigma.size(); ++d) {
    squares += std::pow(z[static_cast<Eigen::Index>(d)] * static_cast<double>(head.inverse_sigma[d]), 2);
    counted += static_cast<int>(head.inverse_sigma[d] > 0.0F);
  }
  return std::max(1e-3, std::sqrt(squares / std::max(1, counted)));
}

VectorD wide(std::span<const float> x) {
  return Eigen::Map<const VectorF>(x.data(), static_cast<Eigen::Index>(x.size())).cast<double>();
}

TEST(SpectralKey, PartsTogetherWriteTheWholeRow) {
  const auto codec = make_spectral_key_codec(random_config(3, 64));
  const std::vector<float> row = gaussian(192, 4);
  EncodeStats whole;
  const std::vector<std::uint8_t> want = encode(*codec, row, 7, whole);
  for (const int parts : {1, 2, 3, 5}) {
    std::vector<std::uint8_t> code(codec->row_bytes(), 0xAA);
    EncodeStats stats;
    for (int part = parts - 1; part >= 0; --part) codec->encode_part(part, parts, row, 7, code, stats);
    EXPECT_EQ(code, want) << parts;
    EXPECT_EQ(stats.rows, 1U);
    EXPECT_EQ(stats.saturated, whole.saturated);
  }
}

TEST(SpectralKey, BytesAreTheSpecifiedOnes) {
  // Quads of 2, 4 and 2 bits: 16 digits, stored as quads 1, 0, 2. Every value lies in the middle of a step, so that no gain
  // costs less than the norm, which coordinate 0 alone decides: 1 in the first head, 2 in the second.
  SpectralKeyHead head = plain_head(12, 2);
  std::fill_n(head.width.begin() + 4, 4, 4);
  for (int d = 0; d < 12; ++d) head.step[size_of(d)] = d < 4 ? 1.0F : (d < 8 ? 0.25F : 2.0F);
  std::fill(head.inverse_sigma.begin(), head.inverse_sigma.end(), 0.0F);
  head.inverse_sigma[0] = 2.0F;
  const std::vector<float> steps = {0.5F, -0.5F, 1.5F, -1.5F, -7.5F, 7.5F, 0.5F, -2.5F, -1.5F, -0.5F, 0.5F, 1.5F};
  std::vector<float> row;
  for (const float gain : {1.0F, 2.0F}) {
    for (std::size_t d = 0; d < 12; ++d) row.push_back(gain * head.step[d] * steps[d]);
  }
  const auto codec = make_spectral_key_codec(config_of({head, head}));
  EXPECT_EQ(codec->name(), "spectral");
  ASSERT_EQ(codec->row_bytes(), 2U * 4 + 2);
  EXPECT_DOUBLE_EQ(codec->bits_per_element(), 8.0 * 10 / 24);
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
  const std::vector<std::uint8_t> expected = {
      0x4C, 0x36, 0xE4,  // low digits of 0 15 8 5, then 2 1 3 0, then 0 1 2 3
      0x6C,              // high digits of 0 15 8 5
      0x4C, 0x36, 0xE4, 0x6C, 0x80, 0x90,
  };
  EXPECT_EQ(code, expected);
  EXPECT_EQ(decode(*codec, code), row);
  EXPECT_EQ(stats.rows, 1U);
  EXPECT_EQ(stats.saturated, 0U);
  EXPECT_EQ(stats.sanitised, 0U);
}

// Every step of the encoder in double against the bytes, every step of the decoder in double against the decoded row.
TEST(SpectralKey, MatchesTheDefinitionInDouble) {
  for (const int dim : kHeadSizes) {
    for (const RopePairing pairing : {RopePairing::norm, RopePairing::neox}) {
      const int heads = 3;
      SpectralKeyConfig config = random_config(heads, dim);
      const auto values = size_of(heads * dim);
      config.mean = matrix_of(gaussian(values, 5), heads);
      config.mean_pre_rope = matrix_of(gaussian(values, 6, 3.0F), heads);
      config.rope = rope_of(pairing, dim - 16, dim);
      const auto codec = make_spectral_key_codec(config);
      const std::int64_t position = 4321;
      const std::vector<float> row = gaussian(values, 7, 2.0F);
      const std::vector<std::uint8_t> bytes = encode(*codec, row, position);
      const std::vector<float> decoded = decode(*codec, bytes, position);
      for (int h = 0; h < heads; ++h) {
        SCOPED_TRACE(fmt::format("dim {} head {}", dim, h));
        const SpectralKeyHead& head = config.heads[size_of(h)];
        std::vector<float> turned(size_of(dim));
        std::copy_n(config.mean_pre_rope.row(h).data(), dim, turned.begin());
        config.rope.apply(turned, position);
        const VectorD mean = config.mean.row(h).cast<double>() + Eigen::Map<const VectorF>(turned.data(), dim).cast<double>();
        const VectorD x = Eigen::Map<const VectorF>(row.data() + h * dim, dim).cast<double>() - mean;
        const VectorD z = x * head.transform.cast<double>();
        const HeadCode code = read_head(config, h, bytes);
        EXPECT_TRUE(search_may_end_at(code.gain, head, z, norm_of(head, z))) << code.gain;
        VectorD coded = VectorD::Zero(dim);
        for (int d = 0; d < dim; ++d) {
          const int width = head.width[size_of(d)];
          if (width == 0) continue;
          const int levels = 1 << width;
          const double step = gain_of(code.gain) * static_cast<double>(head.step[size_of(d)]);
          const double y = z[d] / step;
          const double expected = std::clamp(std::floor(y + levels / 2.0), 0.0, levels - 1.0);
          if (std::abs(y - std::round(y)) > kNearEdge) {
            EXPECT_EQ(code.codes[size_of(d)], static_cast<int>(expected)) << d;
          }
          coded[d] = step * (code.codes[size_of(d)] - (levels - 1) / 2.0);
        }
        const VectorD expected = coded * head.inverse.cast<double>() + mean;
        const VectorD got = Eigen::Map<const VectorF>(decoded.data() + h * dim, dim).cast<double>();
        EXPECT_LT((got - expected).norm(), 1e-5 * expected.norm());
      }
    }
  }
}

// The attention seam: what attention computes in the inner basis equals what it would compute on decoded rows.
TEST(SpectralKey, InnerBasisGivesTheLogitsOfDecodedRows) {
  for (const int dim : kHeadSizes) {
    for (const int mode : {0, 1, 2}) {  // no mean, static, static and RoPE
      const int heads = 2;
      SpectralKeyConfig config = random_config(heads, dim);
      const auto values = size_of(heads * dim);
      if (mode > 0) config.mean = matrix_of(gaussian(values, 41, 3.0F), heads);
      if (mode == 2) {
        config.mean_pre_rope = matrix_of(gaussian(values, 42, 3.0F), heads);
        config.rope = rope_of(RopePairing::neox, dim, dim);
      }
      const auto codec = make_spectral_key_codec(config);
      const std::int64_t position = 123;
      const std::vector<std::uint8_t> code = encode(*codec, gaussian(values, 51), position);
      const std::vector<float> decoded = decode(*codec, code, position);
      for (int h = 0; h < heads; ++h) {
        const std::vector<float> q = gaussian(size_of(dim), 61U + static_cast<unsigned>(h));
        std::vector<float> inner_q(q.size(), kNan);
        std::vector<float> inner_k(q.size(), kNan);
        codec->query_to_inner(h, q, inner_q);
        codec->decode_inner(h, code, inner_k);
        const KeyMean mean = codec->key_mean(h);
        EXPECT_EQ(mean.empty(), mode == 0);
        EXPECT_EQ(mean.offset.empty(), mode == 0);
        ASSERT_EQ(mean.rope != nullptr, mode == 2);
        double logit = dot(inner_q, inner_k);
        if (!mean.offset.empty()) logit += dot(q, mean.offset);
        if (mean.rope != nullptr) {
          std::vector<float> turned(mean.pre_rope.begin(), mean.pre_rope.end());
          mean.rope->apply(turned, position);
          logit += dot(q, turned);
        }
        const std::span<const float> row = std::span(decoded).subspan(size_of(h * dim), q.size());
        const double size = std::sqrt(dot(q, q) * dot(row, row));
        EXPECT_NEAR(logit, dot(q, row), 2e-6 * size) << "dim " << dim << " mode " << mode << " head " << h;
      }
    }
  }
}

// What a row is too long or too short by counts five times, so little of the shrinkage is left that the least error would bring
// (kGaussianDistortion: 12 % at 2 bits): on average, and of each row the more the fewer codes there are to choose from.
TEST(SpectralKey, DecodedRowsAreNearlyUnbiased) {
  struct Case {
    int width;
    double mean, mean_within, deviation;  // of <z, z^> / |z|^2 from 1
  };
  for (const Case& c : {Case{2, -0.0423, 2e-3, 0.0473}, Case{4, -0.0031, 6e-4, 0.0075}, Case{6, -0.0002, 2e-4, 0.0023}}) {
    const int dim = 64;
    const auto codec = make_spectral_key_codec(config_of({plain_head(dim, c.width)}));
    double sum = 0;
    double squares = 0;
    constexpr int kRows = 3000;
    for (unsigned i = 0; i < kRows; ++i) {
      const std::vector<float> row = gaussian(size_of(dim), i, i % 2 == 0 ? 1.0F : 0.1F);
      const double off = dot(row, round_trip(*codec, row)) / dot(row, row) - 1;
      sum += off / kRows;
      squares += off * off / kRows;
    }
    EXPECT_NEAR(sum, c.mean, c.mean_within) << c.width;
    EXPECT_NEAR(std::sqrt(squares), c.deviation, 0.06 * c.deviation) << c.width;
  }
}

double mean_error(const Codec& codec, const std::vector<float>& sigma, unsigned rows) {
  double error = 0;
  double energy = 0;
  for (unsigned i = 0; i < rows; ++i) {
    std::vector<float> row = gaussian(sigma.size(), 1000U + i);
    for (std::size_t d = 0; d < row.size(); ++d) row[d] *= sigma[d];
    error += relative_error(round_trip(codec, row), row) * dot(row, row);
    energy += dot(row, row);
  }
  return error / energy;
}

// Against the best grid for Gaussians of one size, which must reach as far as the largest of very many. The largest coordinate
// of one row is nearer, and a gain of its own makes use of that: the more so the more levels there are. With 2 bits the cost
// along the row outweighs it; a gain without bias there would come to 1 / (1 - 0.119) of the grid's error.
TEST(SpectralKey, ErrorOfGaussianRowsIsThatOfAGridForEach) {
  struct Case {
    int width;
    double share;  // of the error of that grid
  };
  const int dim = 128;
  for (const Case& c : {Case{2, 1.069}, Case{4, 0.878}, Case{6, 0.651}, Case{8, 0.458}}) {
    const auto codec = make_spectral_key_codec(config_of({plain_head(dim, c.width)}));
    const double error = mean_error(*codec, std::vector<float>(size_of(dim), 1.0F), 1500);
    EXPECT_NEAR(error / kGaussianDistortion[c.width / 2 - 1], c.share, 0.02 * c.share) << c.width;
  }
}

// A spectrum that falls by 1 / 256 and the widths that go with it.
struct Spectrum {
  SpectralKeyHead head;
  std::vector<float> sigma;
};

Spectrum falling_spectrum(int dim) {
  Spectrum s{plain_head(dim, 0), std::vector<float>(size_of(dim))};
  int digits = 0;
  for (int d = 0; d < dim; ++d) {
    const std::size_t i = size_of(d);
    s.sigma[i] = std::pow(0.25F, 4.0F * static_cast<float>(d) / static_cast<float>(dim));
    const int width = d < dim / 16 * 4 ? 6 : (d < dim / 16 * 6 / 4 * 4 ? 4 : (d < dim / 16 * 8 ? 2 : 0));
    s.head.width[i] = width;
    if (width > 0) s.head.step[i] = s.sigma[i] * test::kGaussianStep[width / 2 - 1];
    s.head.inverse_sigma[i] = d < dim / 2 ? 1.0F / s.sigma[i] : 0.0F;
    digits += width / 2;
  }
  // Digits of a head are filled up to a multiple of 16 with the last coordinates, which hold next to nothing.
  for (int quad = dim / 4 - 1; digits % kSpectralSlots != 0; --quad) {
    for (std::size_t i = 4 * size_of(quad); i < 4 * size_of(quad) + 4; ++i) {
      s.head.width[i] = 2;
      s.head.step[i] = s.sigma[i];
    }
    digits += 4;
  }
  return s;
}

// The error is that of every coordinate at its width, and all of those without one, less what a gain for every row saves.
TEST(SpectralKey, ErrorOfASpectrumIsTheSumOfItsCoordinates) {
  struct Case {
    int dim;
    double share;
  };
  for (const auto& [dim, share] : {Case{64, 0.881}, Case{80, 0.896}, Case{128, 0.923}}) {
    const Spectrum s = falling_spectrum(dim);
    double energy = 0;
    double expected = 0;
    for (std::size_t d = 0; d < s.sigma.size(); ++d) {
      const double variance = std::pow(static_cast<double>(s.sigma[d]), 2);
      const int width = d < s.sigma.size() / 2 ? s.head.width[d] : 0;
      energy += variance;
      expected += variance * (width > 0 ? kGaussianDistortion[width / 2 - 1] : 1.0);
    }
    const auto codec = make_spectral_key_codec(config_of({s.head}));
    EXPECT_NEAR(mean_error(*codec, s.sigma, 3000) / (expected / energy), share, 0.02) << dim;
  }
}

// Against codes at the row's own norm g0 and the gain that makes such a row unbiased: what choosing a gain is for.
TEST(SpectralKey, TheChosenGainIsBetterThanTheNorm) {
  struct Case {
    int dim;
    double share;
  };
  for (const auto& [dim, share] : {Case{64, 0.751}, Case{128, 0.799}, Case{256, 0.849}}) {
    const Spectrum s = falling_spectrum(dim);
    const auto codec = make_spectral_key_codec(config_of({s.head}));
    double error = 0;
    double error_at_norm = 0;
    double length = 0;
    constexpr int kRows = 1000;
    for (unsigned i = 0; i < kRows; ++i) {
      std::vector<float> row = gaussian(size_of(dim), 1000U + i);
      for (std::size_t d = 0; d < row.size(); ++d) row[d] *= s.sigma[d];
      const VectorD z = wide(row);
      const std::vector<float> decoded = round_trip(*codec, row);
      for (std::size_t d = 0; d < row.size(); ++d) {
        if (s.head.width[d] > 0) error += std::pow(static_cast<double>(decoded[d]) - static_cast<double>(row[d]), 2);
      }
      length += dot(row, decoded) / (kRows * coding(s.head, z, 1.0).energy);
      // z^ = ratio * (codes at the norm): |z - z^|^2 from the three sums.
      const double norm = norm_of(s.head, z);
      const Coding at_norm = coding(s.head, z, norm);
      const double unbiased = norm * at_norm.energy / at_norm.product;
      const double ratio = gain_of(static_cast<int>(std::lround(128 + 16 * std::log2(unbiased)))) / norm;
      const double squares = at_norm.error - at_norm.energy + 2 * at_norm.product;
      error_at_norm += at_norm.energy - 2 * ratio * at_norm.product + ratio * ratio * squares;
    }
    EXPECT_NEAR(error / error_at_norm, share, 0.02) << dim;
    EXPECT_NEAR(length, 0.9989, 6e-4) << dim;  // all but unbiased: next to no energy lies in coordinates of 2 bits
  }
}

TEST(SpectralKey, SomeCoordinatesSaturateByDesign) {
  const int dim = 128;
  const auto codec = make_spectral_key_codec(config_of({plain_head(dim, 2)}));
  EncodeStats stats;
  for (unsigned i = 0; i < 400; ++i) (void)encode(*codec, gaussian(size_of(dim), i), 0, stats);
  const double share = static_cast<double>(stats.saturated) / (400.0 * dim);
  EXPECT_NEAR(share, 0.0209, 0.002);  // 0.0464 = P(|u| > 2 * .9957) at the norm; what is cut off costs more than coarser steps
  EXPECT_EQ(stats.rows, 400U);
  EXPECT_EQ(stats.sanitised, 0U);
}

class SpectralKeyMean : public testing::TestWithParam<RopePairing> {};

// Keys of a bias 100 times their variation have the same relative error as keys without it.
TEST_P(SpectralKeyMean, RopeMeanIsTakenOutAndPutBackAtEveryPosition) {
  const int heads = 2;
  for (const int dim : {64, 80, 128}) {
    SpectralKeyConfig config = config_of({plain_head(dim, 2), plain_head(dim, 2)});
    config.rope = rope_of(GetParam(), dim - 16, dim);  // partial rotary: the last 16 coordinates keep their mean
    const auto values = size_of(heads * dim);
    const std::vector<float> mu = gaussian(values, 31, 100.0F);
    const auto without = make_spectral_key_codec(config);
    config.mean_pre_rope = matrix_of(mu, heads);
    const auto with_mean = make_spectral_key_codec(config);
    for (const std::int64_t position : {0, 1, 777, 100000}) {
      const std::vector<float> noise = gaussian(values, 99U + static_cast<unsigned>(position));
      std::vector<float> row = mu;
      for (int h = 0; h < heads; ++h) config.rope.apply(std::span(row).subspan(size_of(h * dim), size_of(dim)), position);
      const std::vector<float> bias = row;
      for (std::size_t i = 0; i < row.size(); ++i) row[i] += noise[i];
      const auto error = [&](const Codec& codec) {
        std::vector<float> out = round_trip(codec, row, position);
        for (std::size_t i = 0; i < out.size(); ++i) out[i] -= bias[i];
        return relative_error(out, noise);
      };
      const double expected = relative_error(round_trip(*without, noise, position), noise);
      EXPECT_NEAR(error(*with_mean), expected, 0.02 * expected) << position;
      EXPECT_GT(error(*without), 100.0) << position;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pairings, SpectralKeyMean, testing::Values(RopePairing::norm, RopePairing::neox));

TEST(SpectralKey, WithoutRopeTheMeanIsAConstant) {
  const int dim = 64;
  SpectralKeyConfig config = config_of({plain_head(dim, 2)});
  const std::vector<float> mu = gaussian(size_of(dim), 3, 100.0F);
  config.mean = matrix_of(mu, 1);
  const auto codec = make_spectral_key_codec(config);
  EXPECT_TRUE(codec->key_mean(0).pre_rope.empty());
  EXPECT_EQ(codec->key_mean(0).rope, nullptr);
  ASSERT_EQ(codec->key_mean(0).offset.size(), size_of(dim));
  EXPECT_EQ(codec->key_mean(0).offset[5], mu[5]);
  std::vector<float> row = gaussian(size_of(dim), 4);
  const std::vector<float> noise = row;
  for (std::size_t i = 0; i < row.size(); ++i) row[i] += mu[i];
  std::vector<float> out = round_trip(*codec, row, 9);
  EXPECT_EQ(encode(*codec, row, 9), encode(*codec, row, 100));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] -= mu[i];
  const double error = relative_error(out, noise);
  EXPECT_LT(error, 0.2);
  EXPECT_GT(error, 0.08);
}

TEST(SpectralKey, ARowThatIsItsMeanDecodesToIt) {
  const int dim = 96;
  SpectralKeyConfig config = random_config(1, dim);
  const std::vector<float> zeros(size_of(dim));
  const auto plain = make_spectral_key_codec(config);
  const std::vector<std::uint8_t> code = encode(*plain, zeros);
  EXPECT_THAT(code, testing::Each(0));
  EXPECT_EQ(decode(*plain, code), zeros);
  config.mean = matrix_of(gaussian(size_of(dim), 8, 4.0F), 1);
  config.mean_pre_rope = matrix_of(gaussian(size_of(dim), 9, 4.0F), 1);
  config.rope = rope_of(RopePairing::neox, dim, dim);
  std::vector<float> mean(config.mean_pre_rope.data(), config.mean_pre_rope.data() + dim);
  config.rope.apply(mean, 555);
  for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += config.mean.data()[d];
  EXPECT_LT(relative_error(round_trip(*make_spectral_key_codec(config), mean, 555), mean), 1e-4);
}

// What no cache should hold must still give finite rows, and be counted.
TEST(SpectralKey, C3_RowsOfAnySizeStayFinite) {
  for (const int dim : kHeadSizes) {
    const SpectralKeyConfig config = random_config(2, dim);
    const auto codec = make_spectral_key_codec(config);
    for (const float value : {0.0F, 9.0F, -9.0F, 1e-30F, 65504.0F, -65504.0F, 1e30F, -3e38F}) {
      const std::vector<float> constant(size_of(2 * dim), value);
      std::vector<float> mixed = gaussian(constant.size(), 3);
      for (float& x : mixed) x = std::clamp(x, -1.0F, 1.0F) * value;
      for (const std::vector<float>& row : {constant, mixed}) {
        EncodeStats stats;
        const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
        EXPECT_TRUE(all_finite(decode(*codec, code))) << value;
        EXPECT_EQ(stats.sanitised, 0U);
        if (std::fabs(value) < 1e4F) continue;
        EXPECT_GE(stats.saturated, 2U) << "dim " << dim << " value " << value;
        // Far too small, but not nothing. From 2^24 steps on a code is less than the rounding of its coordinate, and all gains
        // of the search cost the same.
        const int least = std::fabs(value) < 1e6F ? 255 : 255 - 18;
        EXPECT_GE(code.back(), least) << "dim " << dim << " value " << value;
        EXPECT_GE(code[code.size() - 2], least) << "dim " << dim << " value " << value;
      }
    }
    std::vector<float> spiked = gaussian(size_of(2 * dim), 4);
    spiked[3] = 1e30F;
    EncodeStats stats;
    EXPECT_TRUE(all_finite(decode(*codec, encode(*codec, spiked, 0, stats))));
    EXPECT_GT(stats.saturated, 0U);
  }
}

TEST(SpectralKey, C3_SumsBeyondBinary32DecodeToTheMean) {
  SpectralKeyHead head = plain_head(64, 2);
  head.transform *= 0x1p50F;
  head.inverse *= 0x1p-50F;
  const auto codec = make_spectral_key_codec(config_of({head}));
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, std::vector<float>(64, 1e10F), 0, stats);
  EXPECT_THAT(code, testing::Each(0));
  EXPECT_EQ(stats.saturated, 1U);
}

// Steps so small that no cost is a number: the gain is the norm's.
TEST(SpectralKey, C3_WithoutACostTheNormDecides) {
  SpectralKeyHead head = plain_head(64, 2);
  std::fill(head.step.begin(), head.step.end(), 1e-25F);
  const auto codec = make_spectral_key_codec(config_of({head}));
  std::vector<float> row;
  for (int d = 0; d < 64; ++d) row.push_back(d % 2 == 0 ? 2.0F : -2.0F);
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
  EXPECT_EQ(code.back(), 128 + 16);
  EXPECT_EQ(code.front(), 0x33);  // codes 3 0 3 0
  EXPECT_EQ(stats.saturated, 64U);
  EXPECT_TRUE(all_finite(decode(*codec, code)));
}

// Nothing of the row has a code, whatever its norm.
TEST(SpectralKey, WithoutEnergyInTheCodesThereIsNoGain) {
  const Spectrum s = falling_spectrum(64);
  std::vector<float> row(64, 1.0F);
  for (std::size_t d = 0; d < row.size(); ++d) row[d] = s.head.width[d] > 0 ? 0.0F : 1.0F;
  SpectralKeyHead head = s.head;
  std::fill(head.inverse_sigma.begin(), head.inverse_sigma.end(), 1.0F);
  EncodeStats stats;
  EXPECT_THAT(encode(*make_spectral_key_codec(config_of({head})), row, 0, stats), testing::Each(0));
  EXPECT_EQ(stats.saturated, 0U);
}

TEST(SpectralKey, C4_NaNAndInfAreReplacedByZeroAndCounted) {
  const SpectralKeyConfig config = random_config(2, 64);
  const auto codec = make_spectral_key_codec(config);
  std::vector<float> row = gaussian(128, 12);
  std::vector<float> clean = row;
  row[5] = kNan;
  row[6] = kInf;
  row[70] = -kInf;
  clean[5] = clean[6] = clean[70] = 0.0F;
  EncodeStats dirty_stats;
  EncodeStats clean_stats;
  EXPECT_EQ(encode(*codec, row, 0, dirty_stats), encode(*codec, clean, 0, clean_stats));
  EXPECT_EQ(dirty_stats.sanitised, 1U);
  EXPECT_EQ(clean_stats.sanitised, 0U);
  EXPECT_EQ(dirty_stats.saturated, clean_stats.saturated);
  EXPECT_TRUE(all_finite(round_trip(*codec, std::vector<float>(128, kNan))));
}

TEST(SpectralKey, NormsBeyondTheRangeOfGainsAreCounted) {
  const int dim = 64;
  const SpectralKeyHead head = plain_head(dim, 8);
  const auto codec = make_spectral_key_codec(config_of({head}));
  for (const float sigma : {1e-3F, 1.0F, 1e4F}) {
    std::vector<float> row;
    for (int d = 0; d < dim; ++d) row.push_back(sigma * (d % 2 == 0 ? 1.0F : -1.0F));
    EncodeStats stats;
    const int gain = encode(*codec, row, 0, stats).back();
    EXPECT_EQ(stats.saturated, sigma == 1.0F ? 0U : (sigma < 1.0F ? 1U : 1U + 64)) << sigma;  // no code below 1e3 is clamped
    EXPECT_TRUE(search_may_end_at(gain, head, wide(row), static_cast<double>(sigma))) << sigma << " gain " << gain;
  }
}

// Gains of the search that have no byte are left out; the others are looked at as ever.
TEST(SpectralKey, TheSearchStaysWithinTheRange) {
  const int dim = 64;
  const SpectralKeyHead head = plain_head(dim, 4);
  const auto codec = make_spectral_key_codec(config_of({head}));
  for (const float sigma : {2e-4F, 3e-3F, 5e-3F, 6e-3F, 8e-3F, 0.012F, 100.0F, 150.0F, 200.0F, 240.0F, 300.0F}) {
    for (unsigned i = 0; i < 20; ++i) {
      std::vector<float> row = gaussian(size_of(dim), i, sigma);
      if (i % 4 == 0) row[i] = 40.0F * sigma;  // the last gain tried, or the last byte
      const VectorD z = wide(row);
      const int gain = encode(*codec, row).back();
      EXPECT_TRUE(search_may_end_at(gain, head, z, norm_of(head, z))) << sigma << " row " << i << " gain " << gain;
    }
  }
}

// Values of n + 3/8 and n + 5/8 in steps are 1/8 off with a gain of 1 and, on the other side, with a gain of 1/2. Both are
// tried, their costs are equal to the last bit and those of all others larger: the first remains.
TEST(SpectralKey, OfEqualCostsTheFirstIsTaken) {
  const int dim = 64;
  SpectralKeyHead head = plain_head(dim, 8);
  std::fill(head.step.begin(), head.step.end(), 1.0F);
  std::fill(head.inverse_sigma.begin() + 1, head.inverse_sigma.end(), 0.0F);
  std::vector<float> row;
  for (int d = 0; d < dim; ++d) {
    const float size = static_cast<float>(58 - d / 4 * 3) + (d % 4 < 2 ? 0.375F : 0.625F);
    row.push_back(d % 2 == 0 ? size : -size);
  }
  head.inverse_sigma[0] = 1.0F / row[0];
  const VectorD z = wide(row);
  EXPECT_EQ(coding(head, z, 1.0).error, coding(head, z, 0.5).error);
  EXPECT_EQ(coding(head, z, 1.0).high, coding(head, z, 0.5).high);
  EXPECT_EQ(encode(*make_spectral_key_codec(config_of({head})), row).back(), 128 - 16);
}

TEST(SpectralKey, CodesDependOnTheRowAndItsPositionOnly) {
  SpectralKeyConfig config = random_config(2, 64);
  config.mean_pre_rope = MatrixF::Constant(2, 64, 2.0F);
  config.rope = rope_of(RopePairing::neox, 64, 64);
  const auto a = make_spectral_key_codec(config);
  const auto b = make_spectral_key_codec(config);
  const std::vector<float> row = gaussian(128, 7);
  const auto first = encode(*a, row, 10);
  (void)encode(*a, gaussian(128, 8), 11);
  EXPECT_EQ(encode(*a, row, 10), first);
  EXPECT_EQ(encode(*b, row, 10), first);
  EXPECT_NE(encode(*a, row, 11), first);
}

TEST(SpectralKey, MidRiseHasAnEdgeAtZero) {
  EXPECT_EQ(mid_rise(0.0F, 2).code, 2);
  EXPECT_EQ(mid_rise(-1e-3F, 2).code, 1);
  EXPECT_EQ(mid_rise(-2.0F, 2).code, 0);
  EXPECT_FALSE(mid_rise(-2.0F, 2).saturated);
  EXPECT_EQ(mid_rise(1.999F, 2).code, 3);
  EXPECT_FALSE(mid_rise(1.999F, 2).saturated);
  for (const float y : {2.0F, 1e30F, kInf}) {
    EXPECT_EQ(mid_rise(y, 2).code, 3);
    EXPECT_TRUE(mid_rise(y, 2).saturated);
  }
  for (const float y : {-2.001F, -kInf, kNan}) {
    EXPECT_EQ(mid_rise(y, 2).code, 0);
    EXPECT_TRUE(mid_rise(y, 2).saturated);
  }
  EXPECT_EQ(mid_rise(-0.5F, 1).code, 0);
  EXPECT_EQ(mid_rise(0.5F, 1).code, 1);
  EXPECT_EQ(mid_rise(127.5F, 8).code, 255);
}

void expect_refused(const std::function<void(SpectralKeyConfig&)>& change, const char* message) {
  SpectralKeyConfig config = config_of({plain_head(64, 2), plain_head(64, 2)});
  (void)make_spectral_key_codec(config);
  change(config);
  try {
    (void)make_spectral_key_codec(config);
    ADD_FAILURE() << "accepted, expected: " << message;
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::StartsWith("spectral: "), testing::HasSubstr(message)));
  }
}

TEST(SpectralKey, C5_BadConfigurationsAreRefusedByName) {
  using Config = SpectralKeyConfig;
  expect_refused([](Config& c) { c.n_head_kv = 0; }, "n_head_kv is 0");
  expect_refused([](Config& c) { c.n_head_kv = 3; }, "2 heads are described; n_head_kv is 3");
  expect_refused([](Config& c) { c.head_dim = 0; }, "head_dim is 0");
  expect_refused([](Config& c) { c.head_dim = 66; }, "head_dim is 66; it must be a multiple of 4");
  expect_refused([](Config& c) { c.head_dim = 2048; }, "head_dim is 2048");
  expect_refused([](Config& c) { c.heads[1] = plain_head(32, 2); }, "head 1: a transform is 32 x 32; head_dim is 64");
  expect_refused([](Config& c) { c.heads[1].inverse = MatrixF::Identity(64, 60); }, "head 1: a transform is 64 x 60");
  expect_refused([](Config& c) { c.heads[0].transform(3, 4) = kNan; }, "head 0: a transform contains NaN");
  expect_refused([](Config& c) { c.heads[0].inverse(3, 4) = kInf; }, "head 0: a transform contains NaN or Inf");
  expect_refused([](Config& c) { c.heads[0].inverse *= 1.02F; }, "is not the inverse");
  expect_refused([](Config& c) { c.heads[0].transform.setZero(); }, "is not the inverse");
  expect_refused([](Config& c) { c.heads[1].width.pop_back(); }, "head 1: widths, steps and sigmas must have 64 entries");
  expect_refused([](Config& c) { c.heads[1].step.pop_back(); }, "must have 64 entries");
  expect_refused([](Config& c) { c.heads[1].inverse_sigma.pop_back(); }, "must have 64 entries");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 3); }, "width 3 is not 0, 2, 4, 6 or 8");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 10); }, "width 10");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, -2); }, "width -2");
  expect_refused([](Config& c) { c.heads[0].width[5] = 4; }, "the coordinates of a quad have different widths");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 4); }, "68 digits are not a multiple of 16");
  for (const float step : {0.0F, -1.0F, kInf, kNan}) {
    expect_refused([&](Config& c) { c.heads[0].step[9] = step; }, "a step is not positive and finite");
  }
  for (const float sigma : {-1.0F, kInf, kNan}) {
    expect_refused([&](Config& c) { c.heads[0].inverse_sigma[9] = sigma; }, "a sigma is not");
  }
  expect_refused([](Config& c) { c.mean = MatrixF::Zero(1, 64); }, "the static mean is 1 x 64");
  expect_refused([](Config& c) { c.mean = MatrixF::Constant(2, 64, kNan); }, "the static mean contains NaN");
  expect_refused([](Config& c) { c.mean_pre_rope = MatrixF::Zero(2, 32); }, "the pre-RoPE mean is 2 x 32");
  expect_refused([](Config& c) { c.mean_pre_rope = MatrixF::Zero(2, 64); }, "needs the layer's RoPE");
}

TEST(SpectralKey, C5_ValidExtremesWork) {
  SpectralKeyHead empty = plain_head(64, 0);  // all of its digits went to other heads
  SpectralKeyHead full = plain_head(64, 8);
  std::fill(full.inverse_sigma.begin(), full.inverse_sigma.end(), 0.0F);  // nothing to take a norm of
  const auto codec = make_spectral_key_codec(config_of({empty, full}));
  EXPECT_EQ(codec->row_bytes(), 0U + 64 + 2);
  const std::vector<float> row = gaussian(128, 4, 1e-3F);
  const std::vector<float> out = round_trip(*codec, row);
  for (std::size_t d = 0; d < 64; ++d) EXPECT_EQ(out[d], 0.0F);
  EXPECT_TRUE(all_finite(out));
  EXPECT_EQ(codec->head_dim(), 64);
  EXPECT_EQ(codec->n_head_kv(), 2);
}

TEST(SpectralKey, WrongRowSizesAreRefused) {
  const auto codec = make_spectral_key_codec(config_of({plain_head(64, 2)}));
  EncodeStats stats;
  std::vector<std::uint8_t> code(codec->row_bytes());
  std::vector<float> row(64);
  EXPECT_THROW(codec->encode(std::vector<float>(63), 0, code, stats), Error);
  EXPECT_THROW(codec->decode(std::span(code).first(code.size() - 1), 0, row), Error);
  EXPECT_THROW(codec->inner_to_output(0, row, 1.0, row), Error);
}

}  // namespace
}  // namespace oscar

#include <bit>

#include "codec/spectral_rows.h"

namespace oscar {
namespace {

using test::all_finite;
using test::decode;
using test::dot;
using test::encode;
using test::gaussian;
using test::kGainRounding;
using test::kHeadSizes;
using test::kInf;
using test::kNan;
using test::relative_error;
using test::round_trip;
using test::size_of;

constexpr double kRates[] = {1.5, 2.0, 2.5, 3.0};

// Step and distortion of the best uniform quantiser of a unit Gaussian with 1, 2 or 3 bits (Max 1960).
struct Grid {
  double step, distortion;
};
constexpr Grid kGrids[] = {{0, 1}, {1.5958, 0.36338}, {0.9957, 0.11885}, {0.5860, 0.03744}};

// Width of a coordinate at a rate: the first half has the larger one.
int width_of(double bits, int d, int dim) {
  const int halves = static_cast<int>(2 * bits);
  return d < dim / 2 ? (halves + 1) / 2 : halves / 2;
}

SpectralValueConfig config_of(int heads, int dim, double bits = 2, unsigned seed = 1) {
  SpectralValueConfig config;
  config.n_head_kv = heads;
  config.head_dim = dim;
  config.bits = bits;
  std::mt19937 rng(seed);
  config.signs.resize(heads, dim);
  for (Eigen::Index i = 0; i < config.signs.size(); ++i) config.signs.data()[i] = (rng() & 1U) != 0 ? 1.0F : -1.0F;
  config.scale.assign(size_of(heads), 1.0F);
  return config;
}

// Sylvester's Hadamard matrix of the largest power of two that divides dim, repeated along the diagonal, in double.
VectorD hadamard_of(const VectorD& x) {
  const auto dim = static_cast<unsigned>(x.size());
  const unsigned block = dim & (~dim + 1U);
  VectorD y = VectorD::Zero(x.size());
  for (unsigned i = 0; i < dim; ++i) {
    for (unsigned j = 0; j < block; ++j) {
      const double sign = (std::popcount((i % block) & j) & 1) != 0 ? -1.0 : 1.0;
      y[i / block * block + j] += sign * x[i] / std::sqrt(static_cast<double>(block));
    }
  }
  return y;
}

VectorD signs_of(const SpectralValueConfig& config, int head, std::int64_t position) {
  VectorD signs = config.signs.row(head).cast<double>();
  for (int d = 0; d < config.head_dim; ++d) signs[d] *= static_cast<double>(value_flip(value_pattern(position), d));
  return signs;
}

// Straight from spectral.h.
struct HeadCode {
  std::vector<int> codes;
  int gain = 0, pattern = 0;
};
HeadCode read_head(const SpectralValueConfig& config, int head, const std::vector<std::uint8_t>& row) {
  const int dim = config.head_dim;
  std::size_t at = size_of(head) * static_cast<std::size_t>(config.bits * dim / 8);
  HeadCode code;
  code.codes.assign(size_of(dim), 0);
  int digit = 0;
  for (int d = 0; d < dim; ++d) {
    if (width_of(config.bits, d, dim) < 2) continue;
    code.codes[size_of(d)] = (row[at + size_of(digit / 4)] >> (2 * (digit % 4))) & 3;
    ++digit;
  }
  at += size_of(digit / 4);
  int single = 0;
  for (int d = 0; d < dim; ++d) {
    const int width = width_of(config.bits, d, dim);
    if (width == 2) continue;
    code.codes[size_of(d)] += ((row[at + size_of(single / 8)] >> (single % 8)) & 1) << (width - 1);
    ++single;
  }
  const int byte = row[row.size() - size_of(config.n_head_kv - head)];
  code.gain = byte % 64;
  code.pattern = byte / 64;
  return code;
}

TEST(SpectralValue, BytesAreTheSpecifiedOnes) {
  struct Case {
    double bits;
    std::vector<double> values;          // of the transformed row, repeated
    std::vector<std::uint8_t> expected;  // of one head
    int gain;
  };
  const std::vector<double> four = {-1.5, -0.5, 0.5, 1.5};
  const std::vector<Case> cases = {
      // |y| / sqrt(D) = 1.118: codes 0 1 2 3; <y, zh> = 1.13 |y|^2: 8 log2(.885) = -1.4
      {2.0, four, {0xE4, 0xE4, 0xE4, 0xE4}, 40 - 1},
      // 2.291: codes 1 2 2 3 4 5 5 6: low bits 1 2 2 3 0 1 1 2, high bits 0 0 0 0 1 1 1 1; 8 log2(84 / 36.53) = 9.6
      {3.0, {-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5}, {0xE9, 0x94, 0xE9, 0x94, 0xF0, 0xF0}, 40 + 10},
      // 2 bits, then the signs 0 0 1 1; 8 log2(20 / 21.33) = -.7
      {1.5, four, {0xE4, 0xE4, 0xCC}, 40 - 1},
      // 3 bits: codes 1 3 4 6, low bits 1 3 0 2, high bits 0 0 1 1; then 2 bits; 8 log2(20 / 21.04) = -.6
      {2.5, four, {0x8D, 0x8D, 0xE4, 0xE4, 0xCC}, 40 - 1},
  };
  for (const Case& c : cases) {
    SpectralValueConfig config = config_of(2, 16, c.bits);
    config.signs.row(0).setOnes();
    config.scale = {1.0F, 2.0F};  // a scale of 2 is an octave less in the gain
    VectorD y(16);
    for (Eigen::Index d = 0; d < 16; ++d) y[d] = c.values[static_cast<std::size_t>(d) % c.values.size()];
    const VectorD x = hadamard_of(y);  // its own inverse
    std::vector<float> row;
    for (Eigen::Index h = 0; h < 2; ++h) {
      for (Eigen::Index d = 0; d < 16; ++d) row.push_back(static_cast<float>(x[d]) * config.signs(h, d));
    }
    std::vector<std::uint8_t> expected = c.expected;
    expected.insert(expected.end(), c.expected.begin(), c.expected.end());
    expected.push_back(static_cast<std::uint8_t>(c.gain));
    expected.push_back(static_cast<std::uint8_t>(c.gain - 8));
    const auto codec = make_spectral_value_codec(config);
    EXPECT_EQ(codec->name(), "spectral");
    ASSERT_EQ(codec->row_bytes(), expected.size()) << c.bits;
    EXPECT_DOUBLE_EQ(codec->bits_per_element(), c.bits + 0.5);
    EncodeStats stats;
    EXPECT_EQ(encode(*codec, row, 0, stats), expected) << c.bits;
    EXPECT_EQ(stats.rows, 1U);
    EXPECT_EQ(stats.saturated, 0U);
    EXPECT_EQ(stats.sanitised, 0U);
  }
}

// Every step of the encoder in double against the bytes, every step of the decoder in double against the decoded row.
TEST(SpectralValue, MatchesTheDefinitionInDouble) {
  for (const int dim : kHeadSizes) {
    for (const double bits : kRates) {
      const int heads = 3;
      SpectralValueConfig config = config_of(heads, dim, bits, 5);
      config.scale = {0.3F, 1.0F, 17.0F};
      const auto codec = make_spectral_value_codec(config);
      ASSERT_EQ(codec->row_bytes(), static_cast<std::size_t>(heads * (bits * dim / 8 + 1)));
      const std::vector<float> row = gaussian(size_of(heads * dim), 7, 2.0F);
      const int position = dim % 256 * 64 + 63;
      const std::vector<std::uint8_t> bytes = encode(*codec, row, position);
      const std::vector<float> decoded = decode(*codec, bytes);
      for (int h = 0; h < heads; ++h) {
        SCOPED_TRACE(fmt::format("dim {} bits {} head {}", dim, bits, h));
        const VectorD signs = signs_of(config, h, position);
        const VectorD x = Eigen::Map<const VectorF>(row.data() + h * dim, dim).cast<double>();
        const VectorD y = hadamard_of(x.cwiseProduct(signs));
        const double rms = y.norm() / std::sqrt(static_cast<double>(dim));
        const HeadCode code = read_head(config, h, bytes);
        VectorD zh(dim);
        for (int d = 0; d < dim; ++d) {
          const int width = width_of(bits, d, dim);
          const Grid& grid = kGrids[width];
          const int levels = 1 << width;
          const double t = y[d] / rms / grid.step + levels / 2.0;
          const double expected = std::clamp(std::floor(t), 0.0, levels - 1.0);
          if (std::abs(t - std::round(t)) > 1e-4) {  // nearer, binary32 may round to the other side
            EXPECT_EQ(code.codes[size_of(d)], static_cast<int>(expected)) << d;
          }
          zh[d] = (code.codes[size_of(d)] - (levels - 1) / 2.0) * grid.step / (1 - grid.distortion);
        }
        const double scale = static_cast<double>(config.scale[size_of(h)]);
        EXPECT_EQ(code.pattern, position / 64 % 4);
        EXPECT_NEAR(code.gain, 40 + 8 * std::log2(y.squaredNorm() / y.dot(zh) / scale), 0.5 + 1e-3);
        const double gain = scale * std::pow(2.0, (code.gain - 40) / 8.0);
        const VectorD expected = (gain * hadamard_of(zh)).cwiseProduct(signs);
        const VectorD got = Eigen::Map<const VectorF>(decoded.data() + h * dim, dim).cast<double>();
        EXPECT_LT((got - expected).norm(), 1e-5 * expected.norm());
      }
    }
  }
}

// The attention seam: a sum of rows in the inner basis equals the sum of decoded rows.
TEST(SpectralValue, InnerBasisGivesTheOutputsOfDecodedRows) {
  for (const int dim : kHeadSizes) {
    for (const double bits : kRates) {
      const int heads = 2;
      const auto codec = make_spectral_value_codec(config_of(heads, dim, bits, 9));
      const auto width = size_of(dim);
      const std::vector<float> weights = {0.5F, 0.25F, 0.125F};
      for (int h = 0; h < heads; ++h) {
        EXPECT_TRUE(codec->key_mean(h).empty());
        std::vector<float> sum(width, 0.0F);
        std::vector<float> expected(width, 1.0F);
        for (std::size_t i = 0; i < weights.size(); ++i) {
          const std::vector<std::uint8_t> code = encode(*codec, gaussian(size_of(heads * dim), 70U + i));
          std::vector<float> inner(width, kNan);
          codec->decode_inner(h, code, inner);
          const std::vector<float> decoded = decode(*codec, code);
          for (std::size_t d = 0; d < width; ++d) {
            sum[d] += weights[i] * inner[d];
            expected[d] += weights[i] * decoded[size_of(h * dim) + d];
          }
        }
        std::vector<float> out(width, 1.0F);  // what is there is added to
        codec->inner_to_output(h, sum, 0.875, out);
        for (std::size_t d = 0; d < width; ++d) EXPECT_NEAR(out[d], expected[d], 1e-5F) << "dim " << dim << " bits " << bits;
      }
    }
  }
}

// E[v^] = v: attention averages values, so an error that does not average out is the worst. Per row <v, v^> = |v|^2 up to the
// rounding of the gain, and that rounding has no direction.
TEST(SpectralValue, DecodedRowsAreUnbiased) {
  for (const double bits : kRates) {
    const int dim = 64;
    const auto codec = make_spectral_value_codec(config_of(1, dim, bits));
    double mean = 0;
    constexpr int kRows = 4000;
    for (unsigned i = 0; i < kRows; ++i) {
      const std::vector<float> row = gaussian(size_of(dim), i, i % 2 == 0 ? 1.0F : 0.1F);
      const double share = dot(row, round_trip(*codec, row)) / dot(row, row);
      ASSERT_LT(share, kGainRounding) << i;
      ASSERT_GT(share, 1 / kGainRounding) << i;
      mean += share / kRows;
    }
    EXPECT_NEAR(mean, 1.0, 1.5e-3) << bits;
  }
}

double mean_error(int dim, double bits, unsigned rows) {
  const auto codec = make_spectral_value_codec(config_of(1, dim, bits));
  double error = 0;
  for (unsigned i = 0; i < rows; ++i) {
    const std::vector<float> row = gaussian(size_of(dim), 1000U + i);
    error += relative_error(round_trip(*codec, row), row) / rows;
  }
  return error;
}

// An unbiased code of the least error d costs d / (1 - d), and half of the coordinates have their own d.
TEST(SpectralValue, ErrorOfGaussianRowsIsTheQuantisers) {
  for (const int dim : {64, 128}) {
    double before = 1;
    for (const double bits : kRates) {
      double expected = std::pow(std::log(2.0) / 8, 2) / 12;  // the gain's rounding
      for (const int d : {0, dim - 1}) {
        const double distortion = kGrids[width_of(bits, d, dim)].distortion;
        expected += distortion / (1 - distortion) / 2;
      }
      const double error = mean_error(dim, bits, 3000);
      EXPECT_LT(error, 1.03 * expected) << bits;
      EXPECT_GT(error, 0.93 * expected) << bits;
      EXPECT_LT(error, 0.7 * before) << bits;
      before = error;
    }
  }
}

TEST(SpectralValue, TheHadamardSpreadsOutliers) {
  const int dim = 128;
  const auto codec = make_spectral_value_codec(config_of(1, dim, 2));
  for (const int at : {0, 17, 127}) {
    std::vector<float> row = gaussian(size_of(dim), 5, 0.1F);
    row[size_of(at)] = 50.0F;
    EXPECT_LT(relative_error(round_trip(*codec, row), row), 0.3) << at;
  }
}

TEST(SpectralValue, ZerosAreExact) {
  for (const double bits : kRates) {
    const auto codec = make_spectral_value_codec(config_of(2, 80, bits));
    std::vector<float> row = gaussian(160, 1);
    std::fill_n(row.begin(), 80, 0.0F);
    EncodeStats stats;
    const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
    EXPECT_EQ(code[code.size() - 2], 0);
    EXPECT_NE(code.back(), 0);
    const std::vector<float> out = decode(*codec, code);
    for (std::size_t d = 0; d < 80; ++d) ASSERT_EQ(out[d], 0.0F);
  }
}

// What no cache should hold must still give finite rows, and be counted.
TEST(SpectralValue, C3_RowsOfAnySizeStayFinite) {
  for (const int dim : kHeadSizes) {
    for (const double bits : kRates) {
      const auto codec = make_spectral_value_codec(config_of(2, dim, bits));
      for (const float value : {0.0F, 9.0F, -9.0F, 1e-30F, 1e-20F, 65504.0F, -65504.0F, 1e30F, -3e38F}) {
        const std::vector<float> constant(size_of(2 * dim), value);
        std::vector<float> mixed = gaussian(constant.size(), 3);
        for (float& x : mixed) x = std::clamp(x, -1.0F, 1.0F) * value;
        for (const std::vector<float>& row : {constant, mixed}) {
          EncodeStats stats;
          const std::vector<float> out = decode(*codec, encode(*codec, row, 0, stats));
          EXPECT_TRUE(all_finite(out)) << value;
          EXPECT_EQ(stats.sanitised, 0U);
          if (std::fabs(value) < 1e4F) continue;
          EXPECT_GE(stats.saturated, 2U) << "dim " << dim << " value " << value;  // both gains, at least
          // Far too small, but still in the right direction.
          EXPECT_GT(dot(row, out), 0.0) << "dim " << dim << " value " << value;
        }
      }
    }
  }
}

TEST(SpectralValue, C4_NaNAndInfAreReplacedByZeroAndCounted) {
  const auto codec = make_spectral_value_codec(config_of(2, 64));
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
  for (const float x : round_trip(*codec, std::vector<float>(128, kNan))) EXPECT_EQ(x, 0.0F);
}

TEST(SpectralValue, SomeCoordinatesSaturateByDesign) {
  const auto codec = make_spectral_value_codec(config_of(1, 128));
  EncodeStats stats;
  for (unsigned i = 0; i < 400; ++i) (void)encode(*codec, gaussian(128, i), 0, stats);
  EXPECT_NEAR(static_cast<double>(stats.saturated) / (400.0 * 128), 0.0464, 0.003);  // P(|u| > 2 * .9957)
  EXPECT_EQ(stats.rows, 400U);
}

TEST(SpectralValue, PatternsTakeTurnsByPagesOfPositions) {
  for (const auto& [position, pattern] : std::vector<std::pair<std::int64_t, int>>{
           {0, 0}, {63, 0}, {64, 1}, {127, 1}, {128, 2}, {255, 3}, {256, 0}, {1'000'000, 1}, {131071, 3}}) {
    EXPECT_EQ(value_pattern(position), pattern) << position;
  }
  for (int p = 0; p < kSignPatterns; ++p) {
    for (int other = 0; other < p; ++other) {
      int equal = 0;
      for (int d = 0; d < 128; ++d) equal += static_cast<int>(value_flip(p, d) == value_flip(other, d));
      EXPECT_NEAR(equal, 64, 20) << p << other;  // as of unrelated ones
    }
  }
  EXPECT_EQ(value_flip(0, 5), 1.0F);
}

// What patterns are for: equal rows at different pages err differently, so their mean is nearer than one of them.
TEST(SpectralValue, ErrorsOfEqualRowsAverageOutOverPages) {
  for (const int dim : {64, 80, 128}) {
    const auto codec = make_spectral_value_codec(config_of(1, dim));
    double one = 0, page = 0, pages = 0;
    constexpr unsigned kRows = 200;
    for (unsigned i = 0; i < kRows; ++i) {
      const std::vector<float> row = gaussian(size_of(dim), 300U + i);
      std::vector<float> same(row.size()), all(row.size());
      for (int k = 0; k < 4; ++k) {
        const std::vector<float> in_page = decode(*codec, encode(*codec, row, k));
        const std::vector<float> in_pages = decode(*codec, encode(*codec, row, 64 * k));
        for (std::size_t d = 0; d < row.size(); ++d) {
          same[d] += in_page[d] / 4;
          all[d] += in_pages[d] / 4;
        }
      }
      one += relative_error(round_trip(*codec, row), row) / kRows;
      page += relative_error(same, row) / kRows;
      pages += relative_error(all, row) / kRows;
    }
    EXPECT_NEAR(page, one, 1e-4) << dim;
    EXPECT_LT(pages, 0.31 * one) << dim;
    EXPECT_GT(pages, 0.24 * one) << dim;
  }
}

TEST(SpectralValue, RowsKeepTheirPatternWhereverTheyAreRead) {
  const auto codec = make_spectral_value_codec(config_of(1, 64));
  const std::vector<float> row = gaussian(64, 3);
  const auto code = encode(*codec, row, 200);
  std::vector<float> here(64), there(64);
  codec->decode(code, 200, here);
  codec->decode(code, 17, there);
  EXPECT_EQ(here, there);
}

TEST(SpectralValue, CodesDependOnRowAndPageOnly) {
  const auto a = make_spectral_value_codec(config_of(2, 64));
  const auto b = make_spectral_value_codec(config_of(2, 64));
  const auto other = make_spectral_value_codec(config_of(2, 64, 2, 2));
  const std::vector<float> row = gaussian(128, 7);
  const auto first = encode(*a, row, 10);
  (void)encode(*a, gaussian(128, 8), 11);
  EXPECT_EQ(encode(*a, row, 10), first);
  EXPECT_EQ(encode(*a, row, 63), first);
  EXPECT_EQ(encode(*a, row, 266), first);
  EXPECT_NE(encode(*a, row, 74), first);
  EXPECT_EQ(encode(*b, row, 10), first);
  EXPECT_NE(encode(*other, row, 10), first);  // the signs are part of the format
}

void expect_refused(const std::function<void(SpectralValueConfig&)>& change, const char* message) {
  SpectralValueConfig config = config_of(2, 64);
  (void)make_spectral_value_codec(config);
  change(config);
  try {
    (void)make_spectral_value_codec(config);
    ADD_FAILURE() << "accepted, expected: " << message;
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::StartsWith("spectral: "), testing::HasSubstr(message)));
  }
}

TEST(SpectralValue, C5_BadConfigurationsAreRefusedByName) {
  using Config = SpectralValueConfig;
  expect_refused([](Config& c) { c.n_head_kv = 0; }, "n_head_kv is 0");
  expect_refused([](Config& c) { c.head_dim = 0; }, "head_dim of V is 0");
  expect_refused([](Config& c) { c.head_dim = 72; }, "head_dim of V is 72; it must be a multiple of 16");
  expect_refused([](Config& c) { c.head_dim = 2048; }, "head_dim of V is 2048");
  for (const double bits : {0.0, 1.0, 1.75, 3.5, 4.0, -2.0}) {
    expect_refused([&](Config& c) { c.bits = bits; }, "bits for V are not 1.5, 2, 2.5 or 3");
  }
  expect_refused([](Config& c) { c.bits = std::numeric_limits<double>::quiet_NaN(); }, "nan bits for V");
  expect_refused([](Config& c) { c.signs = MatrixF(); }, "V needs signs [2, 64] of +1 and -1");
  expect_refused([](Config& c) { c.signs = MatrixF::Ones(2, 32); }, "V needs signs");
  expect_refused([](Config& c) { c.signs(1, 3) = 0.5F; }, "V needs signs");
  expect_refused([](Config& c) { c.signs(1, 3) = kNan; }, "V needs signs");
  expect_refused([](Config& c) { c.scale = {1.0F}; }, "V needs 2 positive scales");
  for (const float scale : {0.0F, -1.0F, kInf, kNan}) {
    expect_refused([&](Config& c) { c.scale[1] = scale; }, "V needs 2 positive scales");
  }
}

TEST(SpectralValue, WrongRowSizesAreRefused) {
  const auto codec = make_spectral_value_codec(config_of(1, 64));
  EncodeStats stats;
  std::vector<std::uint8_t> code(codec->row_bytes());
  std::vector<float> row(64);
  EXPECT_THROW(codec->encode(std::vector<float>(63), 0, code, stats), Error);
  EXPECT_THROW(codec->decode(std::span(code).first(code.size() - 1), 0, row), Error);
  EXPECT_THROW(codec->query_to_inner(0, row, row), Error);
}

}  // namespace
}  // namespace oscar

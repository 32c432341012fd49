// Integer arithmetic on codes: every table of kernels against the codec's own decoding and against the plain table.
#include "attention/integer_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/spectral_rows.h"
#include "oscar/attention/attention.h"
#include "oscar/codec/rates.h"
#include "world.h"

namespace oscar::attention {
namespace {

using test::size_of;

class IntegerCodes : public ::testing::TestWithParam<std::string> {
 protected:
  const Kernels& kernels() {
    const test::CpuPath path(GetParam());
    return active_kernels();
  }
};

INSTANTIATE_TEST_SUITE_P(Paths, IntegerCodes, ::testing::ValuesIn(test::all_paths()), test::path_label);

// Rows of a tile with arbitrary bytes: every code and gain is legal. The last row ends the memory that may be read. Row j of
// values is in basis (first + j / run) mod 4.
struct Rows {
  Rows(const Codec& codec, unsigned seed, int first = 0, int run = kTile)
      : stride(codec.row_bytes()), bytes(stride * kTile + kCodeSlack) {
    std::mt19937 rng(seed);
    for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(rng());
    for (int j = 0; j < kTile; ++j) {
      for (int h = 0; h < codec.n_head_kv(); ++h) {  // gains of the same size, and a zero
        const CodeForm& form = *codec.code_form(h);
        const int gain = form.bases == 1 ? 118 + static_cast<int>(rng() % 20) : 35 + static_cast<int>(rng() % 10);
        const int basis = (first + j / run) % form.bases;
        bytes[size_of(j) * stride + form.gain_offset] =
            static_cast<std::uint8_t>(j == 7 ? 0 : gain + (basis << form.basis_shift));
      }
    }
  }
  [[nodiscard]] std::span<const std::uint8_t> row(int j) const { return std::span(bytes).subspan(size_of(j) * stride, stride); }
  std::size_t stride;
  std::vector<std::uint8_t> bytes;
};

std::vector<std::unique_ptr<Codec>> key_codecs() {
  std::vector<std::unique_ptr<Codec>> codecs;
  unsigned seed = 3;
  for (const int dim : test::kHeadSizes) {
    SpectralKeyConfig config;
    config.n_head_kv = 1 + static_cast<int>(seed % 3);
    config.head_dim = dim;
    for (int h = 0; h < config.n_head_kv; ++h) config.heads.push_back(test::random_head(dim, ++seed));
    codecs.push_back(make_spectral_key_codec(std::move(config)));
  }
  for (const int width : {0, 2, 4, 6, 8}) {
    SpectralKeyConfig config;
    config.n_head_kv = 1;
    config.head_dim = 64;
    config.heads.push_back(test::plain_head(64, width));
    codecs.push_back(make_spectral_key_codec(std::move(config)));
  }
  return codecs;
}

std::vector<std::unique_ptr<Codec>> value_codecs() {
  std::vector<std::unique_ptr<Codec>> codecs;
  for (const int dim : test::kHeadSizes) {
    for (const double bits : kSpectralRates) {
      SpectralValueConfig config;
      config.n_head_kv = 1 + dim / 16 % 3;
      config.head_dim = dim;
      config.bits = bits;
      config.signs = MatrixF::Constant(config.n_head_kv, dim, 1.0F);
      config.scale.assign(size_of(config.n_head_kv), 0.7F);
      codecs.push_back(make_spectral_value_codec(std::move(config)));
    }
  }
  return codecs;
}

// Queries whose coordinates are of very different size, as T^-T and the steps make them.
std::vector<float> random_queries(int rows, int dim, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<float> q(size_of(rows * dim));
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = test::normal(rng) * std::pow(0.1F, static_cast<float>(i % 5));
  return q;
}

int signed_byte(std::uint32_t word, int b) { return static_cast<std::int8_t>((word >> (8 * b)) & 0xFFU); }

// The integers stand for the query: within half a step, in range, and the step is as small as the limits allow.
TEST(IntegerQuery, IsTheNearestThatFits) {
  for (const auto& codec : key_codecs()) {
    for (int h = 0; h < codec->n_head_kv(); ++h) {
      const CodeForm& form = *codec->code_form(h);
      const std::vector<float> q = random_queries(1, codec->head_dim(), 17);
      std::vector<std::uint32_t> words(size_of(key_words(form.coded)) + 1, 0xDEADBEEF);
      IntegerQuery about;
      integer_query(form, q.data(), words.data(), about);
      EXPECT_EQ(words.back(), 0xDEADBEEF);
      if (form.coded == 0) {
        EXPECT_EQ(about.scale, 0.0F);
        continue;
      }
      double centre = 0.0;
      double halves[2] = {0.0, 0.0};
      double rounding[2] = {0.0, 0.0};  // what rounding can add to a half, and what is set aside for it
      double most_pair = 0.0;
      int largest = 0;
      int sums[2] = {0, 0};
      for (int d = 0; d < form.coded; ++d) {
        const int byte = signed_byte(words[size_of(4 * (d / 16) + d % 4)], d / 4 % 4);
        EXPECT_LE(std::abs(static_cast<double>(q[size_of(d)]) - static_cast<double>(about.scale) * byte),
                  0.5001 * static_cast<double>(about.scale));
        centre += byte * static_cast<double>(form.centre[size_of(d)]);
        halves[d / 8 % 2] += std::abs(byte) * static_cast<double>(form.centre[size_of(d)]);
        rounding[d / 8 % 2] += 0.5 * static_cast<double>(form.centre[size_of(d)]);
        largest = std::max(largest, std::abs(byte));
        sums[d / 8 % 2] += byte;
        if (d % 8 < 4 && d + 4 < form.coded) {
          const int other = signed_byte(words[size_of(4 * ((d + 4) / 16) + d % 4)], (d + 4) / 4 % 4);
          most_pair = std::max(most_pair, 2.0 * (std::abs(byte) * static_cast<double>(form.centre[size_of(d)]) +
                                                 std::abs(other) * static_cast<double>(form.centre[size_of(d) + 4])));
        }
      }
      EXPECT_EQ(static_cast<double>(about.centre), centre);
      EXPECT_EQ(about.even_sum, sums[0]);
      EXPECT_EQ(about.odd_sum, sums[1]);
      EXPECT_LE(largest, 127);
      EXPECT_LE(std::max(halves[0], halves[1]), 32767.0);
      EXPECT_LE(most_pair, 32767.0);
      EXPECT_TRUE(largest >= 126 || most_pair > 31000.0 || halves[0] + 2.0 * rounding[0] > 32700.0 ||
                  halves[1] + 2.0 * rounding[1] > 32700.0)
          << "the step is larger than needed: " << largest << " " << most_pair;
    }
  }
}

TEST(IntegerQuery, NaNAndZeroStayWhatTheyAre) {
  for (const auto& codec : key_codecs()) {
    const CodeForm& form = *codec->code_form(0);
    std::vector<float> q(size_of(codec->head_dim()), 0.0F);
    std::vector<std::uint32_t> words(size_of(key_words(form.coded)));
    IntegerQuery about;
    integer_query(form, q.data(), words.data(), about);
    EXPECT_EQ(about.scale, 0.0F);
    if (form.coded == 0) continue;
    for (const int d : {0, 1, form.coded / 2, form.coded - 1}) {
      for (const float bad : {test::kNan, test::kInf, -test::kInf}) {
        q.assign(q.size(), 1.0F);
        q[size_of(d)] = bad;
        integer_query(form, q.data(), words.data(), about);
        EXPECT_TRUE(std::isnan(about.scale)) << "coordinate " << d << " of " << form.coded;
      }
    }
  }
}

// Logits of the integer query, exactly: the codec's decoded row times scale * bytes.
TEST_P(IntegerCodes, KeyScoresAreTheDecodedRowsTimesTheIntegerQuery) {
  constexpr int kRows = kFewRows + 1;  // all at once, and all but one as few rows are
  for (const auto& codec : key_codecs()) {
    const Rows rows(*codec, 11);
    for (int h = 0; h < codec->n_head_kv(); ++h) {
      const CodeForm& form = *codec->code_form(h);
      const int dim = codec->head_dim();
      const int words = key_words(form.coded);
      std::vector<float> q = random_queries(kRows, dim, 5);
      for (int d = 0; d < dim; ++d) q[size_of(dim + d)] = 1.0F;  // the largest sums
      std::vector<std::uint32_t> packed(size_of(kRows * words) + 1);
      std::vector<IntegerQuery> about(kRows);
      for (int r = 0; r < kRows; ++r) {
        integer_query(form, q.data() + r * dim, packed.data() + r * words, about[size_of(r)]);
      }
      for (const int cells : {kTile, 1, 37}) {
        IntegerTile tile;
        const std::vector<Kernels::KeyWord> plan = key_word_plan(form);
        tile.load_keys(kernels(), form, plan, rows.bytes.data(), rows.stride, cells);
        std::vector<float> few;  // of kFewRows, the last
        for (const auto& [n_rows, add] :
             {std::pair(kRows, false), std::pair(kRows, true), std::pair(kFewRows, true), std::pair(kFewRows, false)}) {
          std::vector<float> s(kRows * kTile, 2.0F);
          tile.score(kernels(), packed.data(), about.data(), n_rows, add, s.data());
          for (int r = 0; r < n_rows; ++r) {
            for (int j = 0; j < cells; ++j) {
              std::vector<float> inner(size_of(dim));
              codec->decode_inner(h, rows.row(j), inner);
              double want = add ? 2.0 : 0.0;
              double size = want;
              for (int d = 0; d < form.coded; ++d) {
                const int byte = signed_byte(packed[size_of(r * words + 4 * (d / 16) + d % 4)], d / 4 % 4);
                const double term =
                    static_cast<double>(about[size_of(r)].scale) * byte * static_cast<double>(inner[size_of(d)]);
                want += term;
                size += std::abs(term);
              }
              ASSERT_NEAR(static_cast<double>(s[size_of(r * kTile + j)]), want, 1e-6 * size)
                  << "dim " << dim << ", head " << h << ", row " << r << ", token " << j;
            }
          }
          few = s;
        }
        for (int n_rows = 1; n_rows < 7; ++n_rows) {  // however many rows share a word
          std::vector<float> s(size_of(n_rows * kTile));
          tile.score(kernels(), packed.data(), about.data(), n_rows, false, s.data());
          EXPECT_TRUE(std::equal(s.begin(), s.end(), few.begin())) << n_rows << " rows, dim " << dim;
        }
      }
    }
  }
}

TEST_P(IntegerCodes, WeightsAreRoundedToTheirTileAndCounted) {
  std::mt19937 rng(1);
  for (const float size : {1e-20F, 1e-3F, 1.0F, 1e4F}) {
    std::vector<float> p(kTile);
    std::vector<float> gain(kTile);
    for (float& x : p) x = size * std::abs(test::normal(rng));
    for (float& x : gain) x = std::abs(test::normal(rng));
    p[3] = p[60] = 0.0F;
    std::vector<std::uint8_t> w(kTile + 1, 0xEE);
    std::int32_t total = -1;
    const float scale = kernels().quantise_weights(p.data(), gain.data(), w.data(), &total);
    int sum = 0;
    int largest = 0;
    for (int j = 0; j < kTile; ++j) {
      const double product = static_cast<double>(p[size_of(j)]) * static_cast<double>(gain[size_of(j)]);
      ASSERT_NEAR(static_cast<double>(scale) * w[size_of(j)], product, 0.5001 * static_cast<double>(scale));
      sum += w[size_of(j)];
      largest = std::max(largest, static_cast<int>(w[size_of(j)]));
    }
    EXPECT_EQ(total, sum);
    EXPECT_EQ(largest, 255) << "the largest weight decides the step";
    EXPECT_EQ(w[3], 0);
    EXPECT_EQ(w[kTile], 0xEE);
  }
  const std::vector<float> zero(kTile, 0.0F);
  std::vector<std::uint8_t> w(kTile, 1);
  std::int32_t total = -1;
  EXPECT_EQ(kernels().quantise_weights(zero.data(), zero.data(), w.data(), &total), 0.0F);
  EXPECT_EQ(total, 0);
}

// Sums of weighted codes against decoded rows, for weights that need no rounding: exact up to binary32. In tiles of one basis,
// with a border of two, and with all mixed.
TEST_P(IntegerCodes, ValueSumsAreTheWeightedDecodedRows) {
  constexpr int kRows = kFewRows + 1;
  for (const auto& codec : value_codecs()) {
    for (const auto& [first, run, n_rows] :
         {std::tuple(0, kTile, 3), std::tuple(0, kTile, kRows), std::tuple(3, kTile, kFewRows), std::tuple(3, kTile, 7),
          std::tuple(1, 23, 3), std::tuple(2, 1, 3)}) {
      const Rows rows(*codec, 23, first, run);
      const int dim = codec->head_dim();
      for (int h = 0; h < codec->n_head_kv(); ++h) {
        const CodeForm& form = *codec->code_form(h);
        IntegerTile tile;
        tile.load_values(kernels(), form, rows.bytes.data(), rows.stride, kTile);
        // Row 0: every weight the largest; row 1: random bytes; the others: one token.
        std::vector<float> p(kRows * kTile);
        std::mt19937 rng(9);
        std::set<int> largest_at;  // a token of every basis: its weight decides the step
        for (int b = 0; b < form.bases; ++b) {
          for (int j = kTile - 1; j > 7; --j) {
            if (rows.row(j)[form.gain_offset] >> form.basis_shift != b) continue;
            largest_at.insert(j);
            break;
          }
        }
        for (int r = 0; r < kRows; ++r) {
          for (int j = 0; j < kTile; ++j) {
            const float gain = form.gain[rows.row(j)[form.gain_offset]];
            const int byte = (r == 0)   ? 255
                             : (r == 1) ? (largest_at.contains(j) ? 255 : static_cast<int>(rng() % 256))
                                        : (j == 20 + r ? 255 : 0);
            p[size_of(r * kTile + j)] = (gain > 0.0F) ? static_cast<float>(byte) / gain : 0.0F;
          }
        }
        const int cols = 4 * value_lanes(dim);
        std::vector<float> sums(size_of(kRows * form.bases * cols), 0.0F);
        std::vector<double> weight(5 * kRows, 0.0);
        for (int repeat = 0; repeat < 2; ++repeat) tile.add_values(kernels(), p.data(), n_rows, sums.data(), weight.data(), 5);
        for (int r = 0; r < n_rows; ++r) {
          EXPECT_EQ(weight[size_of(5 * r + 4)], 0.0);
          std::vector<float> out(size_of(dim));
          for (int b = 0; b < form.bases; ++b) {
            std::vector<float> sum(size_of(dim));
            sums_to_basis(form, sums.data() + (r * form.bases + b) * cols, weight[size_of(5 * r + b)], 0.5, sum);
            codec->basis_to_output(h, b, sum, out);
          }
          std::vector<double> want(size_of(dim)), size(size_of(dim));
          for (int j = 0; j < kTile; ++j) {
            std::vector<float> row(size_of(dim));
            codec->decode_inner(h, rows.row(j), row);
            for (std::size_t d = 0; d < row.size(); ++d) {
              const double term = static_cast<double>(p[size_of(r * kTile + j)]) * static_cast<double>(row[d]);
              want[d] += term;
              size[d] += std::abs(term);
            }
          }
          const double largest = *std::max_element(size.begin(), size.end());
          for (int d = 0; d < dim; ++d) {
            ASSERT_NEAR(static_cast<double>(out[size_of(d)]), want[size_of(d)],
                        3e-6 * largest)  // the Hadamard matrix mixes them
                << "dim " << dim << ", bits " << codec->bits_per_element() << ", row " << r << ", coordinate " << d;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace oscar::attention

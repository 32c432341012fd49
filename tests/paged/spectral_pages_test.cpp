#include "oscar/paged/spectral_pages.h"

#include "oscar/method/rotation.h"
#include "spectral_layer.h"

namespace oscar::paged {
namespace {

using test::size_of;

std::vector<std::uint8_t> random_bytes(std::size_t n, std::mt19937& rng) {
  std::vector<std::uint8_t> bytes(n);
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(rng());
  return bytes;
}

// Any value row but for the pattern in its gains, which is that of page `page`.
std::vector<std::uint8_t> random_values(const PageLayout& layout, int page, std::mt19937& rng) {
  std::vector<std::uint8_t> row = random_bytes(layout.value_row_bytes(), rng);
  for (auto gain = row.end() - layout.n_head_kv; gain != row.end(); ++gain)
    *gain = rng() % 8 == 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(*gain % 64 + 64 * (page % 4));
  return row;
}

// Any digits and gains are a row and any are a page, so both directions are the identity.
TEST(SpectralPages, RowsComeBackBitForBit) {
  std::mt19937 rng(1);
  for (const int dim : {64, 128, 256}) {
    const int number = dim / 64;
    const PageLayout layout(dim, {16, dim, 3 * dim / 2, 0});
    std::vector<std::uint8_t> page = random_bytes(layout.page_bytes, rng);
    std::vector<std::vector<std::uint8_t>> k, v;
    for (int token = 0; token < kPageTokens; ++token) {
      k.push_back(random_bytes(layout.key_row_bytes(), rng));
      v.push_back(random_values(layout, number, rng));
      layout.store_rows(k.back(), v.back(), number * kPageTokens + token, page);
    }
    std::vector<std::uint8_t> k_row(layout.key_row_bytes());
    std::vector<std::uint8_t> v_row(layout.value_row_bytes());
    for (int token = 0; token < kPageTokens; ++token) {
      layout.load_rows(page, number * kPageTokens + token, k_row, v_row);
      EXPECT_EQ(k_row, k[size_of(token)]);
      EXPECT_EQ(v_row, v[size_of(token)]);
    }
  }
}

TEST(SpectralPages, PagesComeBackBitForBit) {
  std::mt19937 rng(2);
  const PageLayout layout(128, {112, 144});
  std::vector<std::uint8_t> page = random_bytes(layout.page_bytes, rng);
  for (int h = 0; h < layout.n_head_kv; ++h) {
    std::uint8_t* gains =
        page.data() + layout.head_offset[size_of(h)] + head_bytes(layout.key_slots[size_of(h)], 128) - kPageTokens;
    for (int i = 0; i < kPageTokens; ++i) gains[i] %= 64;
  }
  std::vector<std::uint8_t> copy = random_bytes(layout.page_bytes, rng);
  std::vector<std::uint8_t> k(layout.key_row_bytes());
  std::vector<std::uint8_t> v(layout.value_row_bytes());
  for (int token = 0; token < kPageTokens; ++token) {
    layout.load_rows(page, token, k, v);
    layout.store_rows(k, v, token, copy);
  }
  EXPECT_EQ(copy, page);
}

TEST(SpectralPages, RowsHaveTheSizesOfTheCodecs) {
  const test::SpectralLayer layer = test::spectral_layer(3, 64, 5);
  const SpectralTables tables = spectral_tables(layer.keys, layer.values);
  EXPECT_EQ(tables.layout.key_row_bytes(), make_spectral_key_codec(layer.keys)->row_bytes());
  EXPECT_EQ(tables.layout.value_row_bytes(), make_spectral_value_codec(layer.values)->row_bytes());
}

// Logits and values from the tables alone are those of the codecs' own decoders.
TEST(SpectralPages, TablesSayWhatTheCodecsDecode) {
  for (const auto& [pairing, n_rot] : {std::pair{RopePairing::neox, 64}, {RopePairing::norm, 64}, {RopePairing::neox, 32}}) {
    const int dim = 64;
    const test::SpectralLayer layer = test::spectral_layer(2, dim, 9, pairing, n_rot);
    const SpectralTables t = spectral_tables(layer.keys, layer.values);
    const auto key_codec = make_spectral_key_codec(layer.keys);
    const auto value_codec = make_spectral_value_codec(layer.values);
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    std::vector<float> row(size_of(2 * dim));
    std::vector<float> q(size_of(dim));
    for (float& x : row) x = normal(rng);
    for (float& x : q) x = normal(rng);
    const int position = 777;
    const std::vector<std::uint8_t> k = test::encode(*key_codec, row, position);
    const std::vector<float> decoded = test::decode(*key_codec, k, position);
    for (int h = 0; h < 2; ++h) {
      const auto* digits = k.data() + (h == 0 ? 0 : t.layout.key_slots[0] / 4);
      const double gain = std::exp2((static_cast<double>(k[k.size() - size_of(2 - h)]) - 128) / 16);
      double logit = 0;
      for (std::size_t s = 0; s < t.slot_source[size_of(h)].size(); ++s) {
        const unsigned source = t.slot_source[size_of(h)][s];
        double inner = 0;
        for (int d = 0; d < dim; ++d) inner += static_cast<double>(q[size_of(d)] * t.query[size_of(h)](d, source % 4096));
        logit += gain * inner * std::exp2(2.0 * (source / 4096)) * (((digits[s / 4] >> (2 * (s % 4))) & 3) - 1.5);
      }
      for (int d = 0; d < dim; ++d) logit += static_cast<double>(q[size_of(d)] * t.key_constant(h, d));
      for (std::size_t i = 0; i < t.theta.size(); ++i) {
        const double c = std::cos(position * t.theta[i]);
        const double s = std::sin(position * t.theta[i]);
        const double m1 = t.mean_first(h, static_cast<Eigen::Index>(i));
        const double m2 = t.mean_second(h, static_cast<Eigen::Index>(i));
        logit += q[t.pair_first[i]] * (m1 * c - m2 * s) + q[t.pair_second[i]] * (m1 * s + m2 * c);
      }
      const double want = test::dot(q, std::span(decoded).subspan(size_of(h * dim), size_of(dim)));
      EXPECT_NEAR(logit, want, 1e-3 * (1 + std::abs(want)));
    }
    // Values: the row of all codes by unit, gain and signs.
    const MatrixD hadamard_matrix = hadamard(dim);
    for (const int at : {0, 64, 191, 777, 192}) {
      const int pattern = at / 64 % 4;
      const std::vector<std::uint8_t> v = test::encode(*value_codec, row, at);
      const std::vector<float> value = test::decode(*value_codec, v, at);
      ASSERT_EQ(v.back() / 64, pattern);
      const double gain = std::exp2((v.back() % 64 - 40) / 8.0);
      for (int d = 0; d < dim; ++d) {
        double x = 0;
        for (int i = 0; i < dim; ++i) {
          const int code = (v[size_of(dim / 4 + i / 4)] >> (2 * (i % 4))) & 3;
          x += hadamard_matrix(d, i) * static_cast<double>(t.value_unit[1]) * gain * (code - 1.5);
        }
        EXPECT_NEAR(value[size_of(dim + d)], x * static_cast<double>(t.value_signs(2 * pattern + 1, d)), 1e-5);
      }
    }
  }
}

TEST(SpectralPages, WhatPagesCannotHoldIsRefused) {
  EXPECT_THROW(PageLayout(80, {80}), Error);
  EXPECT_THROW(PageLayout(64, {}), Error);
  EXPECT_THROW(PageLayout(64, std::vector<int>(65, 64)), Error);
  EXPECT_THROW(PageLayout(64, {40}), Error);
  EXPECT_THROW(PageLayout(64, {272}), Error);
  test::SpectralLayer layer = test::spectral_layer(2, 64, 5);
  layer.values.bits = 3;
  EXPECT_THROW(spectral_tables(layer.keys, layer.values), Error);
  const PageLayout layout(64, {64});
  std::vector<std::uint8_t> page(layout.page_bytes), k(layout.key_row_bytes()), v(layout.value_row_bytes());
  EXPECT_THROW(layout.store_rows(k, v, -1, page), Error);
  EXPECT_THROW(layout.store_rows(k, std::span(v).first(3), 0, page), Error);
  EXPECT_NO_THROW(layout.store_rows(k, v, 63, page));
}

// A row that was coded at one position and is now at another.
TEST(SpectralPages, ShiftedValuesAreRefusedWhereTheirPageHasOtherSigns) {
  const test::SpectralLayer layer = test::spectral_layer(2, 64, 5);
  const SpectralTables tables = spectral_tables(layer.keys, layer.values);
  std::vector<std::uint8_t> page(tables.layout.page_bytes);
  std::vector<float> row(2 * 64, 0.0F);
  row[100] = 1.0F;
  const auto keys = make_spectral_key_codec(layer.keys);
  const auto values = make_spectral_value_codec(layer.values);
  const auto store = [&](int coded_at, int position) {
    tables.layout.store_rows(test::encode(*keys, row, coded_at), test::encode(*values, row, coded_at), position, page);
  };
  EXPECT_NO_THROW(store(70, 70));
  EXPECT_NO_THROW(store(70, 70 + 256));
  try {
    store(70, 140);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "paged: the value of head 1 at position 140 was coded with signs 1 at another position, its page is summed with "
        "signs 2; code the row again where it is now");
  }
  row[100] = 0.0F;  // nothing has no signs
  EXPECT_NO_THROW(store(70, 140));
}

}  // namespace
}  // namespace oscar::paged

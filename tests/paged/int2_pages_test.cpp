#include "oscar/paged/int2_pages.h"

#include <bit>
#include <cmath>

#include "int2_layer.h"
#include "oscar/base/half.h"

namespace oscar::paged {
namespace {

using test::Int2Means;
using test::size_of;

std::vector<std::uint8_t> random_bytes(std::size_t n, std::mt19937& rng) {
  std::vector<std::uint8_t> bytes(n);
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(rng());
  return bytes;
}

// Any bytes are a row and any are a page, so both directions are the identity.
TEST(Int2Pages, RowsAndPagesComeBackBitForBit) {
  std::mt19937 rng(1);
  for (const int dim : {64, 128, 256}) {
    const PageLayout layout = PageLayout::int2(dim, 3);
    EXPECT_EQ(layout.page_bytes, 3U * (32U * static_cast<unsigned>(dim) + 512U));
    EXPECT_EQ(layout.key_row_bytes(), size_of(3 * (dim / 4 + 4)));
    std::vector<std::uint8_t> page = random_bytes(layout.page_bytes, rng);
    std::vector<std::vector<std::uint8_t>> k, v;
    for (int token = 0; token < kPageTokens; ++token) {
      k.push_back(random_bytes(layout.key_row_bytes(), rng));
      v.push_back(random_bytes(layout.value_row_bytes(), rng));
      layout.store_rows(k.back(), v.back(), 5 * kPageTokens + token, page);
    }
    std::vector<std::uint8_t> k_row(layout.key_row_bytes());
    std::vector<std::uint8_t> v_row(layout.value_row_bytes());
    std::vector<std::uint8_t> copy = random_bytes(layout.page_bytes, rng);
    for (int token = 0; token < kPageTokens; ++token) {
      layout.load_rows(page, token, k_row, v_row);
      EXPECT_EQ(k_row, k[size_of(token)]);
      EXPECT_EQ(v_row, v[size_of(token)]);
      layout.store_rows(k_row, v_row, token, copy);
    }
    EXPECT_EQ(copy, page);
  }
}

// The bytes of one token by the words of page_format.h alone.
TEST(Int2Pages, GridsStandWhereTheFormatSays) {
  const int dim = 64;
  const PageLayout layout = PageLayout::int2(dim, 2);
  std::vector<std::uint8_t> page(layout.page_bytes, 0);
  std::vector<std::uint8_t> k(layout.key_row_bytes(), 0), v(layout.value_row_bytes(), 0);
  const std::size_t head = size_of(dim / 4 + 4);  // of a row
  k[head + 16] = 0xAB;                            // low byte of the step of head 1
  k[head + 19] = 0xCD;                            // high byte of its lo
  v[head + 17] = 0xEF;
  layout.store_rows(k, v, 64 + 37, page);
  // Token 37: row 5 of the second half, group 2. Head 1 begins at 32 * 64 + 512, its grids 32 * 64 bytes further.
  const std::size_t grids = 32 * 64 + 512 + 32 * 64;
  const std::size_t at = 4 * (4 * 5 + 2);
  EXPECT_EQ(page[grids + at], 0xAB);
  EXPECT_EQ(page[grids + at + 3], 0xCD);
  EXPECT_EQ(page[grids + 256 + at + 1], 0xEF);
  EXPECT_EQ(page.size() - size_of(static_cast<int>(std::count(page.begin(), page.end(), 0))), 3U);
}

TEST(Int2Pages, RowsHaveTheSizesOfTheCodecs) {
  const test::Int2Layer layer = test::int2_layer(3, 64, 5, Int2Means::pre_rope);
  const Int2Tables tables = int2_tables(layer.keys, layer.values);
  EXPECT_EQ(tables.layout.key_row_bytes(), make_int2_codec(layer.keys)->row_bytes());
  EXPECT_EQ(tables.layout.value_row_bytes(), make_int2_codec(layer.values)->row_bytes());
}

// Codes and grid of one row of one head, by the comment of Int2EncodeTables.
std::vector<std::uint8_t> code_row(std::vector<float> x, const std::vector<MatrixF>& rotation, int head, int rank) {
  const std::size_t dim = x.size();
  std::vector<float> y = x;
  if (!rotation.empty()) {
    for (std::size_t j = 0; j < dim; ++j) {
      y[j] = 0.0F;
      for (std::size_t d = 0; d < dim; ++d) {
        const float term = x[d] * rotation[size_of(head)](static_cast<Eigen::Index>(d), static_cast<Eigen::Index>(j));
        y[j] += term;
      }
    }
  }
  float t = 65504.0F;
  if (rank >= 0) {
    std::vector<float> size(dim);
    std::transform(y.begin(), y.end(), size.begin(), [](float a) { return std::fabs(a); });
    std::sort(size.begin(), size.end());
    t = std::min(t, size[size_of(rank)]);
  }
  for (float& a : y) a = std::clamp(a, -t, t);
  const float least = *std::min_element(y.begin(), y.end());
  const float largest = *std::max_element(y.begin(), y.end());
  const std::uint16_t half[2] = {float_to_half((largest - least) / 3.0F), float_to_half(least)};
  std::vector<std::uint8_t> bytes(dim / 4, 0);
  for (std::size_t i = 0; i < dim && half[0] != 0; ++i) {
    const float u = (y[i] - half_to_float(half[1])) / half_to_float(half[0]) + 0.5F;
    const auto code = static_cast<unsigned>(std::clamp(u, 0.0F, 3.0F));
    bytes[i / 4] = static_cast<std::uint8_t>(bytes[i / 4] | code << (i % 4 * 2));
  }
  for (const std::uint16_t h : half) {
    bytes.push_back(static_cast<std::uint8_t>(h & 255U));
    bytes.push_back(static_cast<std::uint8_t>(h >> 8));
  }
  return bytes;
}

TEST(Int2Pages, EncodeTablesGiveTheBytesOfTheCodec) {
  const int heads = 2;
  for (const int dim : {64, 128}) {
    for (const Int2Means means : {Int2Means::none, Int2Means::constant, Int2Means::pre_rope}) {
      for (const bool rotated : {true, false}) {
        test::Int2Layer layer = test::int2_layer(heads, dim, 11, means, RopePairing::norm, dim / 2);
        if (!rotated) layer.keys.rotation = layer.values.rotation = {};
        const Int2EncodeTables t = int2_encode_tables(layer.keys, layer.values);
        const auto keys = make_int2_codec(layer.keys);
        const auto values = make_int2_codec(layer.values);
        std::mt19937 rng(3);
        std::normal_distribution<float> normal;
        for (const int position : {0, 1, 777, 131071}) {
          std::vector<float> row(size_of(heads * dim));
          for (float& x : row) x = half_to_float(float_to_half(normal(rng)));
          if (position == 1) std::fill(row.begin(), row.end(), -0.0F);
          const std::vector<std::uint8_t> k = test::encode(*keys, row, position);
          const std::vector<std::uint8_t> v = test::encode(*values, row, position);
          std::vector<std::uint8_t> k_want, v_want;
          for (int h = 0; h < heads; ++h) {
            std::vector<float> x(row.begin() + h * dim, row.begin() + (h + 1) * dim);
            std::vector<float> key = x;
            for (int d = 0; d < dim; ++d) {
              key[size_of(d)] -= t.offset(h, d);
              key[size_of(d)] -= t.rest(h, d);
              x[size_of(d)] -= t.value_mean(h, d);
            }
            for (std::size_t i = 0; i < t.theta.size(); ++i) {
              const double angle = position * t.theta[i];
              const auto c = static_cast<float>(std::cos(angle) * t.magnitude);
              const auto s = static_cast<float>(std::sin(angle) * t.magnitude);
              const float m1 = t.mean_first(h, static_cast<Eigen::Index>(i));
              const float m2 = t.mean_second(h, static_cast<Eigen::Index>(i));
              key[t.pair_first[i]] -= m1 * c - m2 * s;
              key[t.pair_second[i]] -= m1 * s + m2 * c;
            }
            const auto append = [](std::vector<std::uint8_t>& to, const std::vector<std::uint8_t>& bytes) {
              to.insert(to.end(), bytes.begin(), bytes.end());
            };
            append(k_want, code_row(key, t.key_rotation, h, t.key_rank[size_of(h)]));
            append(v_want, code_row(x, t.value_rotation, h, t.value_rank[size_of(h)]));
          }
          EXPECT_EQ(k, k_want) << dim << ' ' << rotated << ' ' << position;
          EXPECT_EQ(v, v_want) << dim << ' ' << rotated << ' ' << position;
        }
      }
    }
  }
}

TEST(Int2Pages, WhatPagesCannotHoldIsRefused) {
  EXPECT_THROW(PageLayout::int2(80, 1), Error);
  EXPECT_THROW(PageLayout::int2(64, 0), Error);
  EXPECT_THROW(PageLayout::int2(64, 65), Error);
  const auto message = [](const std::function<void(test::Int2Layer&)>& spoil) {
    test::Int2Layer layer = test::int2_layer(2, 64, 5, Int2Means::pre_rope);
    spoil(layer);
    try {
      static_cast<void>(int2_encode_tables(layer.keys, layer.values));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  using testing::HasSubstr;
  EXPECT_EQ(message([](test::Int2Layer&) {}), "no error");
  EXPECT_THAT(message([](test::Int2Layer& l) { l.values.group_size = 32; }), HasSubstr("one group per head of 64"));
  EXPECT_THAT(message([](test::Int2Layer& l) { l.keys.clip = {1.5F}; }), HasSubstr("clip ratio"));
  EXPECT_THAT(message([](test::Int2Layer& l) { l.values = l.keys; }), HasSubstr("only keys can"));
  EXPECT_THAT(message([](test::Int2Layer& l) { l.values = test::int2_layer(3, 64, 5, Int2Means::none).values; }),
              HasSubstr("pages need the same shape"));
}

}  // namespace
}  // namespace oscar::paged

#include "codec/digits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

namespace oscar {
namespace {

constexpr int kHeadSizes[] = {16, 20, 64, 80, 96, 112, 128, 192, 256};

// Width maps of a head: uniform ones, every pair of neighbours at every quad (a level then ends anywhere), random ones.
std::vector<std::vector<int>> width_maps(int dim) {
  std::vector<std::vector<int>> maps;
  for (const int width : {0, 2, 4, 6, 8}) maps.emplace_back(static_cast<std::size_t>(dim), width);
  for (int high = 2; high <= 8; high += 2) {
    for (int quad = 1; quad < dim / 4; ++quad) {
      std::vector<int> map(static_cast<std::size_t>(dim), high - 2);
      std::fill_n(map.begin(), 4 * quad, high);
      maps.push_back(std::move(map));
    }
  }
  std::mt19937 rng(static_cast<unsigned>(dim));
  for (int i = 0; i < 40; ++i) {
    std::vector<int> quads(static_cast<std::size_t>(dim / 4));
    for (int& width : quads) width = 2 * static_cast<int>(rng() % 5);
    std::sort(quads.rbegin(), quads.rend());
    std::vector<int> map;
    for (const int width : quads) map.insert(map.end(), 4, width);
    maps.push_back(std::move(map));
  }
  return maps;
}

std::size_t coded(const std::vector<int>& widths) {
  return static_cast<std::size_t>(std::count_if(widths.begin(), widths.end(), [](int width) { return width > 0; }));
}

// Straight from spectral.h: level after level, digit i of a level in byte i / 4, bit pair i mod 4, low digits first.
std::vector<int> codes_of(const std::vector<int>& widths, const std::vector<std::uint8_t>& bytes) {
  std::vector<int> codes(coded(widths), 0);
  std::size_t level_begin = 0;
  for (int level = 0; level < 4; ++level) {
    std::size_t digit = 0;
    for (; digit < codes.size() && widths[digit] > 2 * level; ++digit) {
      codes[digit] += ((bytes.at(level_begin + digit / 4) >> (2 * (digit % 4))) & 3) << (2 * level);
    }
    level_begin += digit / 4;
  }
  EXPECT_EQ(level_begin, bytes.size());
  return codes;
}

TEST(DigitLayout, LevelsFollowEachOther) {
  const std::vector<int> widths = {8, 8, 8, 8, 6, 6, 6, 6, 6, 6, 6, 6, 2, 2, 2, 2, 0, 0, 0, 0};
  const DigitLayout layout(widths);
  EXPECT_EQ(layout.count, (std::array<std::size_t, 4>{16, 12, 12, 4}));
  EXPECT_EQ(layout.offset, (std::array<std::size_t, 4>{0, 4, 7, 10}));
  EXPECT_EQ(layout.bytes, 11U);
  ASSERT_EQ(layout.centre.size(), 16U);
  EXPECT_EQ(layout.centre[0], 127.5F);
  EXPECT_EQ(layout.centre[4], 31.5F);
  EXPECT_EQ(layout.centre[15], 1.5F);
}

TEST(Digits, BytesAreTheSpecifiedOnes) {
  const DigitLayout layout(std::vector<int>{6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2});
  const std::vector<std::uint8_t> codes = {0, 63, 27, 36, 15, 0, 9, 6, 3, 2, 1, 0};
  std::vector<std::uint8_t> bytes(layout.bytes, 0xAA);
  pack_digits(layout, codes.data(), bytes.data());
  const std::vector<std::uint8_t> expected = {
      0x3C,  // 0 3 3 0: the lowest digits of 0, 63, 27 = 123 in base 4, 36 = 210
      0x93,  // 3 0 1 2
      0x1B,  // 3 2 1 0
      0x6C,  // 0 3 2 1
      0x63,  // 3 0 2 1
      0x9C,  // 0 3 1 2
  };
  EXPECT_EQ(bytes, expected);
}

// Every instruction set this processor has; the baseline is always among them.
class DigitKernelsOf : public testing::TestWithParam<DigitKernels> {};

INSTANTIATE_TEST_SUITE_P(Sets, DigitKernelsOf, testing::ValuesIn(digit_kernel_sets().begin(), digit_kernel_sets().end()),
                         [](const auto& set) { return std::string(set.param.name); });

TEST_P(DigitKernelsOf, UnpackingIsBitIdenticalToTheDefinition) {
  std::mt19937 rng(7);
  for (const int dim : kHeadSizes) {
    for (const std::vector<int>& widths : width_maps(dim)) {
      const DigitLayout layout(widths);
      std::vector<std::uint8_t> bytes(layout.bytes);  // exactly as many as there are: a sanitizer sees reads beyond
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(rng());
      const std::vector<int> codes = codes_of(widths, bytes);
      std::vector<float> y(codes.size() + 1, -7.0F);
      GetParam().unpack(layout, bytes.data(), 0.37F, y.data());
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const float centre = static_cast<float>((1 << widths[i]) - 1) / 2.0F;
        ASSERT_EQ(y[i], 0.37F * (static_cast<float>(codes[i]) - centre)) << "dim " << dim << " coordinate " << i;
      }
      ASSERT_EQ(y.back(), -7.0F) << "dim " << dim;
    }
  }
}

TEST_P(DigitKernelsOf, UnpackingWhatWasPackedGivesEveryCodeBack) {
  std::mt19937 rng(8);
  for (const int dim : kHeadSizes) {
    for (const std::vector<int>& widths : width_maps(dim)) {
      const DigitLayout layout(widths);
      std::vector<std::uint8_t> codes(coded(widths));
      for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(rng() % (1U << widths[i]));
      std::vector<std::uint8_t> bytes(layout.bytes, 0xAA);  // every bit must be written
      pack_digits(layout, codes.data(), bytes.data());
      std::vector<float> y(codes.size());
      GetParam().unpack(layout, bytes.data(), 2.0F, y.data());
      for (std::size_t i = 0; i < codes.size(); ++i) {
        ASSERT_EQ(y[i], static_cast<float>(2 * codes[i] + 1 - (1 << widths[i]))) << "dim " << dim << " coordinate " << i;
      }
    }
  }
}

TEST(Digits, BaselineIsTheLastSet) { EXPECT_STREQ(digit_kernel_sets().back().name, "baseline"); }

}  // namespace
}  // namespace oscar

// Methods that quantise several tokens together: their definitions, and how rows become groups.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "rivals/rival_rows.h"

namespace oscar {
namespace {

using test::Bytes;
using test::error_of;
using test::gaussian_rows;
using test::rival;
using test::round_trip;

constexpr double kRounding = 0.02;

TEST(Kivi, KeysAreMinMaxOfEachChannelAndGroup) {
  const int dim = 48, group = 32;
  const MatrixF rows = gaussian_rows(3 * group, 2 * dim, 1);
  const MatrixF decoded = round_trip(*rival("sim:kivi2-g32", true, 2, dim), rows);
  for (int g = 0; g < 3; ++g) {
    for (int c = 0; c < 2 * dim; ++c) {
      EXPECT_LT(test::off_min_max(rows.col(c).segment(g * group, group).transpose().cast<double>(),
                                  decoded.col(c).segment(g * group, group).transpose().cast<double>(), 2),
                kRounding);
    }
  }
}

TEST(Kivi, ValuesAreMinMaxOfEachTokenAndRunOfDimensions) {
  const MatrixF rows = gaussian_rows(5, 2 * 48, 2);
  const MatrixF decoded = round_trip(*rival("sim:kivi2-g32", false, 2, 48), rows);
  for (int t = 0; t < 5; ++t) {
    for (const auto& [begin, n] : std::vector<std::pair<int, int>>{{0, 32}, {32, 16}, {48, 32}, {80, 16}}) {
      EXPECT_LT(
          test::off_min_max(rows.row(t).segment(begin, n).cast<double>(), decoded.row(t).segment(begin, n).cast<double>(), 2),
          kRounding);
    }
  }
}

// Keys of real models have channels far from 0: what KIVI was made for.
TEST(Kivi, BeatsPerTokenGridsOnChannelOutliers) {
  MatrixF rows = gaussian_rows(256, 128, 3);
  for (const int c : {5, 40, 77}) rows.col(c).array() += 30.0F;
  const auto noise = [&](const char* name) {  // against the unit variance within a channel
    return (round_trip(*rival(name, true, 1, 128), rows) - rows).squaredNorm() / static_cast<float>(rows.size());
  };
  EXPECT_NEAR(noise("sim:kivi2-g32"), 0.155, 0.03);  // min-max of 32 Gaussian values
  EXPECT_NEAR(noise("sim:kivi2-g128"), 0.25, 0.03);  // of 128
  EXPECT_GT(noise("sim:naive-int2"), 0.8);           // everything but the outliers is lost
}

TEST(Ott, KeepsTheTokensOfLeastNorm) {
  MatrixF rows = gaussian_rows(128, 2 * 64, 4);
  // Far below the other tokens of its head: these alone would widen the channel's range.
  rows.leftCols(64).array() += 5.0F;
  rows.row(9).head(64).setConstant(0.125F);
  rows.row(100).head(64).setConstant(-0.25F);
  const MatrixF ott = round_trip(*rival("sim:ott", true, 2, 64), rows);
  const MatrixF kivi = round_trip(*rival("sim:kivi2-g128", true, 2, 64), rows);
  EXPECT_EQ(ott.row(9).head(64), rows.row(9).head(64));
  EXPECT_EQ(ott.row(100).head(64), rows.row(100).head(64));
  EXPECT_NE(ott.row(9).tail(64), rows.row(9).tail(64));  // another head has its own
  const auto noise = [&](const MatrixF& decoded) { return (decoded - rows).leftCols(64).squaredNorm() / (128 * 64); };
  EXPECT_NEAR(noise(ott), 0.25, 0.03);
  EXPECT_GT(noise(kivi), 0.4);
}

TEST(Kitty, BoostsTheLargestEighthOfTheChannels) {
  MatrixF rows = gaussian_rows(128, 64, 5);
  std::vector<int> boosted(8);
  for (int i = 0; i < 8; ++i) rows.col(boosted[static_cast<std::size_t>(i)] = 7 * i + 3) *= 4.0F;
  const MatrixF decoded = round_trip(*rival("sim:kitty", true, 1, 64), rows);
  for (int c = 0; c < 64; ++c) {
    const int bits = std::find(boosted.begin(), boosted.end(), c) == boosted.end() ? 2 : 4;
    EXPECT_LT(test::off_min_max(rows.col(c).transpose().cast<double>(), decoded.col(c).transpose().cast<double>(), bits),
              kRounding)
        << c;
  }
}

TEST(Kvarn, GaussianErrorFromBothSides) {
  const MatrixF rows = 3 * gaussian_rows(256, 128, 6);
  // Min-max of 128 Gaussian values at 2 and 4 bits.
  EXPECT_NEAR(error_of(round_trip(*rival("sim:kvarn-k2v2", true, 1, 128), rows), rows), 0.25, 0.03);
  EXPECT_NEAR(error_of(round_trip(*rival("sim:kvarn-k2v2", false, 1, 128), rows), rows), 0.25, 0.03);
  EXPECT_NEAR(error_of(round_trip(*rival("sim:kvarn-k4v2", true, 1, 128), rows), rows), 0.01, 0.002);
  EXPECT_NEAR(error_of(round_trip(*rival("sim:kvarn-k4v2", false, 1, 128), rows), rows), 0.25, 0.03);
}

// Tokens of very different size: the token scale takes them out of the channels' ranges.
TEST(Kvarn, BalancesTokens) {
  MatrixF rows = 3 * gaussian_rows(128, 64, 7);
  for (int t = 0; t < 128; t += 3) rows.row(t) *= 20.0F;
  const auto small_tokens = [&](const char* name) {
    const MatrixF decoded = round_trip(*rival(name, true, 1, 64), rows);
    double error = 0, energy = 0;
    for (int t = 1; t < 128; t += 3) {
      error += static_cast<double>((decoded.row(t) - rows.row(t)).squaredNorm());
      energy += static_cast<double>(rows.row(t).squaredNorm());
    }
    return error / energy;
  };
  EXPECT_LT(small_tokens("sim:kvarn-k2v2"), 0.35);
  EXPECT_GT(small_tokens("sim:kivi2-g128"), 1.0);
}

// --- how rows become groups

struct Cells {
  explicit Cells(const Codec& c, int n) : codec(c), codes(static_cast<std::size_t>(n), Bytes(c.row_bytes())) {}
  void write(const MatrixF& rows, int t, std::int64_t position) { write(rows, t, position, t); }
  void write(const MatrixF& rows, int t, std::int64_t position, int cell) {
    EncodeStats stats;
    codec.encode({rows.data() + t * rows.cols(), static_cast<std::size_t>(rows.cols())}, position,
                 codes[static_cast<std::size_t>(cell)], stats);
  }
  const Codec& codec;
  std::vector<Bytes> codes;
};

std::vector<Bytes> in_order(const MatrixF& rows) {
  const auto codec = rival("sim:kivi2-g32", true, 1, static_cast<int>(rows.cols()));
  Cells cells(*codec, static_cast<int>(rows.rows()));
  for (int t = 0; t < rows.rows(); ++t) cells.write(rows, t, t);
  return cells.codes;
}

TEST(Groups, RowsAreExactUntilTheGroupIsComplete) {
  const MatrixF rows = gaussian_rows(32, 64, 10);
  const auto codec = rival("sim:kivi2-g32", true, 1, 64);
  Cells cells(*codec, 32);
  for (int t = 0; t < 31; ++t) cells.write(rows, t, t);
  for (int t = 0; t < 31; ++t)
    EXPECT_EQ(std::memcmp(cells.codes[static_cast<std::size_t>(t)].data(), rows.data() + t * 64, 256), 0);
  cells.write(rows, 31, 31);
  EXPECT_EQ(cells.codes, in_order(rows));
  for (int t = 0; t < 32; ++t)
    EXPECT_NE(std::memcmp(cells.codes[static_cast<std::size_t>(t)].data(), rows.data() + t * 64, 256), 0);
}

TEST(Groups, DoNotDependOnTheOrderOfArrival) {
  const MatrixF rows = gaussian_rows(96, 64, 11);
  const std::vector<Bytes> expected = in_order(rows);
  std::vector<int> order(96);
  std::iota(order.begin(), order.end(), 0);
  for (const unsigned seed : {1U, 2U}) {
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    const auto codec = rival("sim:kivi2-g32", true, 1, 64);
    Cells cells(*codec, 96);
    for (const int t : order) cells.write(rows, t, t);
    EXPECT_EQ(cells.codes, expected);
  }
}

TEST(Groups, ThreadsMayShareACodec) {
  const MatrixF rows = gaussian_rows(256, 64, 12);
  const std::vector<Bytes> expected = in_order(rows);
  const auto codec = rival("sim:kivi2-g32", true, 1, 64);
  Cells cells(*codec, 256);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int t = thread; t < 256; t += 4) cells.write(rows, t, t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(cells.codes, expected);
}

TEST(Groups, AClearedCacheStartsAfresh) {
  const MatrixF old_rows = gaussian_rows(45, 64, 13);
  const MatrixF rows = gaussian_rows(64, 64, 14);
  const auto codec = rival("sim:kivi2-g32", true, 1, 64);
  Cells cells(*codec, 64);
  for (int t = 0; t < 45; ++t) cells.write(old_rows, t, t);
  for (Bytes& code : cells.codes) std::fill(code.begin(), code.end(), std::uint8_t{0});
  // Backwards: every group is nearly full of rows that are gone when its first new one arrives.
  for (int t = 63; t >= 0; --t) cells.write(rows, t, t);
  EXPECT_EQ(cells.codes, in_order(rows));
}

TEST(Groups, RewrittenRowsAreQuantisedWithTheirNeighbours) {
  MatrixF rows = gaussian_rows(32, 64, 15);
  const auto codec = rival("sim:kivi2-g32", true, 1, 64);
  Cells cells(*codec, 32);
  for (int t = 0; t < 32; ++t) cells.write(rows, t, t);
  rows.bottomRows(10) = gaussian_rows(10, 64, 16);
  for (int t = 22; t < 32; ++t) cells.write(rows, t, t);
  EXPECT_EQ(cells.codes, in_order(rows));
}

TEST(Groups, ASecondSequenceIsRefused) {
  const MatrixF rows = gaussian_rows(8, 64, 17);
  const auto codec = rival("sim:kivi2-g32", true, 1, 64);
  Cells cells(*codec, 8);
  cells.write(rows, 0, 5, 0);
  try {
    cells.write(rows, 1, 5, 1);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr("position 5"), testing::HasSubstr("one sequence")));
  }
  cells.write(rows, 2, 6, 0);  // the cell holds another token now, so position 5 is free
  cells.write(rows, 3, 5, 1);
  EXPECT_EQ(std::memcmp(cells.codes[1].data(), rows.data() + 3 * 64, 256), 0);
}

}  // namespace
}  // namespace oscar

#include "attention/key_mean.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "oscar/attention/attention.h"
#include "world.h"

namespace oscar::attention {
namespace {

struct Case {
  RopePairing pairing;
  int dim, n_rot;
};

class MeanTermTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Layouts, MeanTermTest,
                         ::testing::Values(Case{RopePairing::neox, 64, 64}, Case{RopePairing::norm, 64, 64},
                                           Case{RopePairing::neox, 80, 32}, Case{RopePairing::norm, 128, 20},
                                           Case{RopePairing::neox, 256, 256}));

// q . (offset + RoPE_t(mean)) against Rope::apply, for tiles of consecutive positions of every magnitude and for jumps.
TEST_P(MeanTermTest, EqualsRopeAppliedToTheMean) {
  const Case c = GetParam();
  std::mt19937 rng(3);
  RopeParams params;
  params.pairing = c.pairing;
  params.n_rot = c.n_rot;
  params.attn_factor = 1.25F;
  const Rope rope(params, c.dim);
  const auto dim = static_cast<std::size_t>(c.dim);
  std::vector<float> mean(dim), offset(dim);
  for (std::size_t d = 0; d < dim; ++d) {
    mean[d] = test::normal(rng);
    offset[d] = test::normal(rng);
  }
  const RopeTable table(rope.theta());
  EXPECT_TRUE(table.same_angles(rope.theta()));
  EXPECT_FALSE(table.same_angles(rope.theta().first(1)));
  KeyMean key_mean;
  key_mean.offset = offset;
  key_mean.pre_rope = mean;
  key_mean.rope = &rope;
  const HeadMean head(key_mean, &table, c.dim);
  constexpr int kRows = 7;
  std::vector<float> queries(kRows * dim);
  for (float& x : queries) x = test::normal(rng);
  for (const std::string_view name : cpu_paths()) {
    const test::CpuPath path(name);
    const Kernels& kernels = active_kernels();
    MeanTerm term;
    term.start(kernels, head, queries.data(), c.dim, kRows);
    ASSERT_FALSE(term.empty());
    std::vector<float> s(kRows * kTile);
    TilePhase phase;
    for (const std::int32_t t : {0, 1, 63, 64, 100, 4095, 4096, 262143, 16777217, 2000000000, -7, -100000}) {
      TilePositions positions;
      for (int j = 0; j < kTile; ++j) {
        // A negative t: scattered positions, with holes.
        const std::int32_t p = (t >= 0) ? t + j : (j % 9 == 4) ? -1 : (j * j * -t) % 300000;
        positions.at[static_cast<std::size_t>(j)] = (t == 100 && j < 5) ? -1 : p;
      }
      positions.find_run();
      EXPECT_EQ(positions.run_start, t >= 0 ? t : -1);
      term.logits(kernels, positions, phase, s.data());
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kTile; ++j) {
          const std::int32_t p = positions.at[static_cast<std::size_t>(j)];
          if (p < 0) continue;
          std::vector<float> rotated = mean;
          rope.apply(rotated, p);
          double want = 0.0;
          double size = 0.0;
          for (std::size_t d = 0; d < dim; ++d) {
            const double value = static_cast<double>(rotated[d]) + static_cast<double>(offset[d]);
            const double product = static_cast<double>(queries[static_cast<std::size_t>(r) * dim + d]) * value;
            want += product;
            size += std::abs(product);
          }
          // Beyond 2^24 the angle itself has rounding in binary64: 2e9 * 2^-53 radians.
          ASSERT_NEAR(static_cast<double>(s[static_cast<std::size_t>(r * kTile + j)]), want, 7e-7 * size)
              << "position " << p << ", " << name;
        }
      }
    }
  }
}

TEST(MeanTerm, NoMeanCostsNothing) {
  const HeadMean head;
  const std::vector<float> q(64, 1.0F);
  MeanTerm term;
  term.start(active_kernels(), head, q.data(), 64, 1);
  EXPECT_TRUE(term.empty());
}

// Slow pairs share a few functions: there must be much fewer than one of either kind per pair, or the point of it is lost.
TEST(RopeTable, SlowPairsShareTheirBasis) {
  RopeParams params;
  params.n_rot = 128;
  params.base = 1e6F;
  params.pairing = RopePairing::neox;
  const Rope rope(params, 128);
  EXPECT_LE(RopeTable(rope.theta()).depth(), 20);
}

}  // namespace
}  // namespace oscar::attention

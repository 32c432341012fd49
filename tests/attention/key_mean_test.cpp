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

class MeanRowsTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Layouts, MeanRowsTest,
                         ::testing::Values(Case{RopePairing::neox, 64, 64}, Case{RopePairing::norm, 64, 64},
                                           Case{RopePairing::neox, 80, 32}, Case{RopePairing::norm, 128, 20},
                                           Case{RopePairing::neox, 256, 256}));

// q . (offset + RoPE_t(mean)) against Rope::apply, for neighbours, jumps and positions of every magnitude.
TEST_P(MeanRowsTest, EqualsRopeAppliedToTheMean) {
  const Case c = GetParam();
  std::mt19937 rng(3);
  RopeParams params;
  params.pairing = c.pairing;
  params.n_rot = c.n_rot;
  params.attn_factor = 1.25F;
  const Rope rope(params, c.dim);
  const auto dim = static_cast<std::size_t>(c.dim);
  std::vector<float> mean(dim), offset(dim), q(dim);
  for (std::size_t d = 0; d < dim; ++d) {
    mean[d] = test::normal(rng);
    offset[d] = test::normal(rng);
    q[d] = test::normal(rng);
  }
  const RopeTable table(rope.theta());
  EXPECT_TRUE(table.same_angles(rope.theta()));
  EXPECT_FALSE(table.same_angles(rope.theta().first(1)));
  KeyMean key_mean;
  key_mean.offset = offset;
  key_mean.pre_rope = mean;
  key_mean.rope = &rope;
  const HeadMean head(key_mean, &table, c.dim);
  std::vector<float> ordered(static_cast<std::size_t>(head.row_size()));
  std::vector<float> row(ordered.size());
  head.reorder_query(q, ordered.data());
  MeanRows rows;
  rows.start(&head);
  const test::CpuPath path(cpu_paths().front());
  for (const std::int64_t t :
       {0L, 1L, 63L, 64L, 65L, 127L, 128L, 100L, 4095L, 4096L, 4160L, 262143L, 262144L, 16777217L, 2000000000L, 7L}) {
    rows.fill(active_kernels(), t, row.data());
    double got = static_cast<double>(head.constant_logit(q));
    for (std::size_t i = 0; i < row.size(); ++i) got += static_cast<double>(ordered[i]) * static_cast<double>(row[i]);
    std::vector<float> rotated = mean;
    rope.apply(rotated, t);
    double want = 0.0;
    double size = 0.0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double term = static_cast<double>(q[d]) * (static_cast<double>(rotated[d]) + static_cast<double>(offset[d]));
      want += term;
      size += std::abs(term);
    }
    // Beyond 2^24 the angle itself has rounding in binary64: 2e9 * 2^-53 radians.
    EXPECT_NEAR(got, want, 5e-7 * size) << "position " << t;
  }
}

TEST(HeadMean, NoMeanCostsNothing) {
  const HeadMean head;
  EXPECT_EQ(head.row_size(), 0);
  const std::vector<float> q(64, 1.0F);
  EXPECT_EQ(head.constant_logit(q), 0.0F);
}

}  // namespace
}  // namespace oscar::attention

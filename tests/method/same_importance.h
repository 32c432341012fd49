// Bit equality of importance statistics.
#pragma once

#include <gtest/gtest.h>

#include "oscar/method/moments.h"

namespace oscar::test {

inline void expect_identical(const HeadImportance& a, const HeadImportance& b) {
  EXPECT_EQ(a.metric, b.metric);
  EXPECT_EQ(a.joint, b.joint);
  EXPECT_EQ(a.pair_weight, b.pair_weight);
  EXPECT_EQ(a.output_energy, b.output_energy);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.sample_keys, b.sample_keys);
  EXPECT_EQ(a.sample_weights, b.sample_weights);
  EXPECT_EQ(a.sample_positions, b.sample_positions);
}

}  // namespace oscar::test

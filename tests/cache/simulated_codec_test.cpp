// A cache whose codecs simulate a rival: larger codes, nominal sizes, no saved states.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/test_cache.h"
#include "oscar/base/error.h"
#include "oscar/rivals/rivals.h"

namespace oscar {
namespace {

using namespace test;

constexpr Windows kWindows{4, 16, 0};

std::vector<LayerSpec> simulated_layers(const char* codec) {
  std::vector<LayerSpec> specs = coded_layers();
  for (LayerSpec& s : specs) {
    s.k = make_rival(codec, true, {kHeads, kDim, test_rope(), {}});
    s.v = make_rival(codec, false, {kHeads, kDim, {}, {}});
  }
  return specs;
}

TEST(SimulatedCodec, SizesAreTheRivalsOwn) {
  KvCache cache(64, kWindows, simulated_layers("sim:turboquant-3"));
  feed(cache, 0, 1, 0, 40, 0);
  const double bits = 3 + 16.0 / kDim + 3 + 32.0 / kDim;
  EXPECT_EQ(cache.memory().code_bytes, static_cast<std::size_t>(std::llround(40 * kLayers * bits * kValues / 8)));
  EXPECT_GE(cache.memory().resident_bytes, 40 * kLayers * 2 * kValues * sizeof(float));
}

TEST(SimulatedCodec, StatesWithCodedRowsAreRefused) {
  KvCache cache(64, kWindows, simulated_layers("sim:kivi2-g32"));
  feed(cache, 0, 1, 0, 30, 0);
  feed(cache, 0, 1, 30, 10, 30);
  std::vector<std::uint16_t> row(kValues);
  cache.export_row(0, true, 39, row);  // its exact row is there
  ASSERT_FALSE(cache.has_exact(10));
  try {
    cache.export_row(0, true, 10, row);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr("sim:kivi2-g32"), testing::HasSubstr("cannot be saved")));
  }
}

// The whole path: rows go through the cache, a group is quantised when its last row arrives, codes outlive exact rows.
TEST(SimulatedCodec, GroupsOfTokensAreQuantisedInTheCachesMemory) {
  const std::vector<LayerSpec> layers = simulated_layers("sim:kivi2-g32");
  KvCache cache(128, kWindows, layers);
  for (int chunk = 0; chunk < 10; ++chunk) feed(cache, 0, 1, 8 * chunk, 8, 8 * chunk);
  MatrixF rows(80, static_cast<Eigen::Index>(kValues));
  MatrixF decoded = rows;
  for (std::int32_t p = 0; p < 80; ++p) {
    const std::vector<float> exact = to_floats(expected_exact(text_row(1, true, 1, p)));
    rows.row(p) = Eigen::Map<const VectorF>(exact.data(), rows.cols());
    cache.read_row(1, true, p, false, {decoded.row(p).data(), kValues});
  }
  for (Eigen::Index channel = 0; channel < rows.cols(); ++channel) {
    for (const int group : {0, 32}) {
      const auto x = rows.col(channel).segment(group, 32);
      const auto y = decoded.col(channel).segment(group, 32);
      const float step = (x.maxCoeff() - x.minCoeff()) / 3;
      EXPECT_LE((y - x).cwiseAbs().maxCoeff(), 0.51F * step);
      for (Eigen::Index t = 0; t < 32; ++t) {
        const float code = (y[t] - x.minCoeff()) / step;
        EXPECT_NEAR(code, std::round(code), 0.01F);
      }
    }
  }
  EXPECT_EQ(decoded.bottomRows(16), rows.bottomRows(16));  // of an incomplete group
  EXPECT_NE(decoded.topRows(16), rows.topRows(16));
}

}  // namespace
}  // namespace oscar

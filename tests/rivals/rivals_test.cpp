// The table, and what all simulated codecs have in common.
#include "oscar/rivals/rivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "oscar/base/error.h"
#include "rivals/rival_rows.h"

namespace oscar {
namespace {

using test::Bytes;
using test::error_of;
using test::gaussian_rows;
using test::neox_rope;
using test::rival;
using test::round_trip;

template <class F>
std::string error_text(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Rivals, NominalBitsOfHeadsOf128) {
  const std::map<std::string_view, std::pair<double, double>> expected = {
      {"q8_0", {8.5, 8.5}},
      {"q4_0", {4.5, 4.5}},
      {"q4_0-plain", {4.5, 4.5}},
      {"q4_1", {5, 5}},
      {"fp8-e4m3", {8, 8}},
      {"naive-int2", {2.25, 2.25}},
      {"quarot-int2", {2.25, 2.25}},
      {"rotatekv", {2.25, 2.25}},
      {"turboquant-2", {2.125, 2.25}},
      {"turboquant-3", {3.125, 3.25}},
      {"saw-int4", {4.25, 4.25}},
      {"kivi2-g32", {3, 3}},
      {"kivi2-g128", {2.25, 2.25}},
      {"kitty", {2.5, 2.25}},  // 2.38 on average
      {"ott", {2.5, 2.25}},
      {"kvarn-k4v2", {4.375, 2.375}},
      {"kvarn-k2v2", {2.375, 2.375}},
  };
  ASSERT_EQ(rivals().size(), expected.size());
  for (const RivalInfo& info : rivals()) {
    const auto& [k, v] = expected.at(info.name);
    EXPECT_DOUBLE_EQ(info.bits(true, 128), k) << info.name;
    EXPECT_DOUBLE_EQ(info.bits(false, 128), v) << info.name;
    EXPECT_FALSE(info.description.empty());
    const auto codec = rival("sim:" + std::string(info.name), true, 2, 128);
    EXPECT_DOUBLE_EQ(codec->bits_per_element(), k);
    EXPECT_EQ(codec->row_bytes(), 2U * 128 * 4);
    EXPECT_TRUE(codec->simulated());
    EXPECT_EQ(codec->name(), "sim:" + std::string(info.name));
  }
}

TEST(Rivals, ShortHeadsPayMoreForMetadata) {
  const auto bits = [](const char* name, bool is_k) { return rival(name, is_k, 1, 64)->bits_per_element(); };
  EXPECT_DOUBLE_EQ(bits("sim:naive-int2", true), 2.5);
  EXPECT_DOUBLE_EQ(bits("sim:turboquant-2", true), 2.25);
  EXPECT_DOUBLE_EQ(bits("sim:kivi2-g32", false), 3);
  EXPECT_DOUBLE_EQ(bits("sim:kivi2-g128", true), 2.25);  // along the tokens, whatever the head's size
  EXPECT_DOUBLE_EQ(bits("sim:kivi2-g128", false), 2.5);
  EXPECT_DOUBLE_EQ(rival("sim:kivi2-g32", false, 1, 80)->bits_per_element(), 2 + 3 * 32.0 / 80);
}

TEST(Rivals, UnknownNamesAreRefusedWithTheKnownOnes) {
  for (const char* name : {"sim:kivi3", "sim:", "sim:+mean", "sim:q4_0+median", "sim:q4_0+mean+mean"}) {
    EXPECT_THAT(error_text([&] { check_rival(name); }),
                testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("kivi2-g32"), testing::HasSubstr("turboquant-3")));
  }
  EXPECT_NE(error_text([] { (void)rival("q4_0", true, 1, 64); }), "no error");
  check_rival("sim:q4_0+mean");
  EXPECT_FALSE(is_rival("int2"));
  EXPECT_THAT(error_text([] { (void)rival("sim:naive-int2", true, 1, 2048); }), testing::HasSubstr("2048"));
}

TEST(Rivals, TheMeanVariantRemovesTheRotatedMeanOfKeys) {
  const int dim = 64;
  const Rope rope = neox_rope(dim, 48);
  const MatrixF mean = 20 * gaussian_rows(2, dim, 1);
  const MatrixF noise = gaussian_rows(128, 2 * dim, 2);
  MatrixF rows = noise;
  for (int t = 0; t < 128; ++t) {
    for (int h = 0; h < 2; ++h) {
      VectorF turned = mean.row(h);
      rope.apply({turned.data(), static_cast<std::size_t>(dim)}, 256 + t);
      rows.row(t).segment(h * dim, dim) += turned;
    }
  }
  for (const RivalInfo& info : rivals()) {
    if (info.name == "fp8-e4m3") continue;  // a mean costs it nothing but the exponent
    const std::string name = "sim:" + std::string(info.name);
    const auto distance = [&](const std::string& variant) {
      return (round_trip(*rival(variant, true, 2, dim, rope, mean), rows, 256) - rows).squaredNorm() / noise.squaredNorm();
    };
    const float without = distance(name);
    const float with = distance(name + "+mean");
    EXPECT_LT(with, 0.5F) << name;
    EXPECT_LT(with, 0.5F * without) << name;
    // And what is left is coded as it would be without any mean.
    const double plain = error_of(round_trip(*rival(name, true, 2, dim, rope), noise, 256), noise);
    EXPECT_NEAR(with, plain, 0.05 * plain + 1e-6) << name;
    // Values have no such mean.
    EXPECT_EQ(round_trip(*rival(name + "+mean", false, 2, dim), noise), round_trip(*rival(name, false, 2, dim), noise));
  }
  EXPECT_THAT(error_text([&] { (void)rival("sim:q4_0+mean", true, 2, dim, rope); }), testing::HasSubstr("mean before RoPE"));
  // A layer without RoPE: the mean is a constant.
  const MatrixF constant = noise + mean.reshaped<Eigen::RowMajor>(1, 2 * dim).replicate(128, 1);
  EXPECT_LT(
      (round_trip(*rival("sim:q4_0+mean", true, 2, dim, {}, mean), constant) - constant).squaredNorm() / noise.squaredNorm(),
      0.02F);
}

TEST(Rivals, TheSeamGivesDecodedRowsInTheModelsBasis) {
  const int dim = 48;
  const MatrixF row = gaussian_rows(1, 2 * dim, 3);
  const auto codec = rival("sim:turboquant-2", true, 2, dim);
  EncodeStats stats;
  Bytes code(codec->row_bytes());
  codec->encode({row.data(), 2U * dim}, 7, code, stats);
  std::vector<float> decoded(2U * dim), inner(dim), sum(dim, 1.0F);
  codec->decode(code, 7, decoded);
  codec->decode_inner(1, code, inner);
  EXPECT_TRUE(std::equal(inner.begin(), inner.end(), decoded.begin() + dim));
  codec->inner_to_output(1, inner, 1.0, sum);
  for (std::size_t d = 0; d < sum.size(); ++d) EXPECT_EQ(sum[d], 1.0F + inner[d]);
  codec->query_to_inner(0, inner, sum);
  EXPECT_EQ(sum, inner);
  EXPECT_TRUE(codec->key_mean(0).empty());
  EXPECT_THROW(codec->encode({row.data(), 2U * dim - 1}, 7, code, stats), Error);
}

TEST(Rivals, HostileRowsDecodeToFiniteNumbers) {
  const Rope rope = neox_rope(64, 64);
  const MatrixF mean = gaussian_rows(1, 64, 4);
  for (const RivalInfo& info : rivals()) {
    for (const bool is_k : {true, false}) {
      const auto codec = rival("sim:" + std::string(info.name) + "+mean", is_k, 1, 64, rope, mean);
      MatrixF rows = MatrixF::Zero(128, 64);
      rows.row(1).setConstant(65504.0F);
      rows.row(2).setConstant(-65504.0F);
      rows(3, 5) = std::numeric_limits<float>::quiet_NaN();
      rows(4, 6) = std::numeric_limits<float>::infinity();
      rows.row(5).setConstant(0x1p-24F);
      rows(6, 0) = 1e38F;
      EXPECT_TRUE(round_trip(*codec, rows).allFinite()) << info.name << is_k;
      EncodeStats stats;
      Bytes code(codec->row_bytes());
      codec->encode({rows.data() + 3 * 64, 64}, 1000, code, stats);
      EXPECT_EQ(stats.rows, 1U);
      EXPECT_EQ(stats.sanitised, 1U);
    }
  }
}

}  // namespace
}  // namespace oscar

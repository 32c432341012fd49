#include "codec/spectral_keys.h"

namespace oscar {
namespace {

using test::all_finite;
using test::config_of;
using test::decode;
using test::dot;
using test::encode;
using test::gain_of;
using test::gaussian;
using test::kHeadSizes;
using test::kInf;
using test::kNan;
using test::kNearEdge;
using test::matrix_of;
using test::norm_of;
using test::plain_head;
using test::random_config;
using test::relative_error;
using test::rope_of;
using test::round_trip;
using test::search_may_end_at;
using test::size_of;

// What spectral.h says about the bytes of one head, without the codec: codes in T's order and the gain byte.
struct HeadCode {
  std::vector<int> codes;  // [D], 0 where nothing is stored
  int gain = 0;
};

HeadCode read_head(const SpectralKeyConfig& config, int head, const std::vector<std::uint8_t>& row) {
  std::size_t at = 0;
  for (int h = 0; h < head; ++h) {
    for (const int width : config.heads[size_of(h)].width) at += size_of(width);
  }
  at /= 8;
  const std::vector<int>& width = config.heads[size_of(head)].width;
  std::vector<std::size_t> order;  // stored order: by descending width, equal widths in T's order
  for (int w = 8; w > 0; w -= 2) {
    for (std::size_t d = 0; d < width.size(); ++d) {
      if (width[d] == w) order.push_back(d);
    }
  }
  HeadCode code;
  code.codes.assign(width.size(), 0);
  for (int level = 0; level < 4; ++level) {
    std::size_t digit = 0;
    for (; digit < order.size() && width[order[digit]] > 2 * level; ++digit) {
      code.codes[order[digit]] += ((row[at + digit / 4] >> (2 * (digit % 4))) & 3) << (2 * level);
    }
    at += digit / 4;
  }
  code.gain = row[row.size() - config.heads.size() + size_of(head)];
  return code;
}

TEST(SpectralKey, PartsTogetherWriteTheWholeRow) {
  const auto codec = make_spectral_key_codec(random_config(3, 64));
  const std::vector<float> row = gaussian(192, 4);
  EncodeStats whole;
  const std::vector<std::uint8_t> want = encode(*codec, row, 7, whole);
  for (const int parts : {1, 2, 3, 5}) {
    std::vector<std::uint8_t> code(codec->row_bytes(), 0xAA);
    EncodeStats stats;
    for (int part = parts - 1; part >= 0; --part) codec->encode_part(part, parts, row, 7, code, stats);
    EXPECT_EQ(code, want) << parts;
    EXPECT_EQ(stats.rows, 1U);
    EXPECT_EQ(stats.saturated, whole.saturated);
  }
}

TEST(SpectralKey, BytesAreTheSpecifiedOnes) {
  // Quads of 2, 4 and 2 bits: 16 digits, stored as quads 1, 0, 2. Every value lies in the middle of a step, so that no gain
  // costs less than the norm, which coordinate 0 alone decides: 1 in the first head, 2 in the second.
  SpectralKeyHead head = plain_head(12, 2);
  std::fill_n(head.width.begin() + 4, 4, 4);
  for (int d = 0; d < 12; ++d) head.step[size_of(d)] = d < 4 ? 1.0F : (d < 8 ? 0.25F : 2.0F);
  std::fill(head.inverse_sigma.begin(), head.inverse_sigma.end(), 0.0F);
  head.inverse_sigma[0] = 2.0F;
  const std::vector<float> steps = {0.5F, -0.5F, 1.5F, -1.5F, -7.5F, 7.5F, 0.5F, -2.5F, -1.5F, -0.5F, 0.5F, 1.5F};
  std::vector<float> row;
  for (const float gain : {1.0F, 2.0F}) {
    for (std::size_t d = 0; d < 12; ++d) row.push_back(gain * head.step[d] * steps[d]);
  }
  const auto codec = make_spectral_key_codec(config_of({head, head}));
  EXPECT_EQ(codec->name(), "spectral");
  ASSERT_EQ(codec->row_bytes(), 2U * 4 + 2);
  EXPECT_DOUBLE_EQ(codec->bits_per_element(), 8.0 * 10 / 24);
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
  const std::vector<std::uint8_t> expected = {
      0x4C, 0x36, 0xE4,  // low digits of 0 15 8 5, then 2 1 3 0, then 0 1 2 3
      0x6C,              // high digits of 0 15 8 5
      0x4C, 0x36, 0xE4, 0x6C, 0x80, 0x90,
  };
  EXPECT_EQ(code, expected);
  EXPECT_EQ(decode(*codec, code), row);
  EXPECT_EQ(stats.rows, 1U);
  EXPECT_EQ(stats.saturated, 0U);
  EXPECT_EQ(stats.sanitised, 0U);
}

// Every step of the encoder in double against the bytes, every step of the decoder in double against the decoded row.
TEST(SpectralKey, MatchesTheDefinitionInDouble) {
  for (const int dim : kHeadSizes) {
    for (const RopePairing pairing : {RopePairing::norm, RopePairing::neox}) {
      const int heads = 3;
      SpectralKeyConfig config = random_config(heads, dim);
      const auto values = size_of(heads * dim);
      config.mean = matrix_of(gaussian(values, 5), heads);
      config.mean_pre_rope = matrix_of(gaussian(values, 6, 3.0F), heads);
      config.rope = rope_of(pairing, dim - 16, dim);
      const auto codec = make_spectral_key_codec(config);
      const std::int64_t position = 4321;
      const std::vector<float> row = gaussian(values, 7, 2.0F);
      const std::vector<std::uint8_t> bytes = encode(*codec, row, position);
      const std::vector<float> decoded = decode(*codec, bytes, position);
      for (int h = 0; h < heads; ++h) {
        SCOPED_TRACE(fmt::format("dim {} head {}", dim, h));
        const SpectralKeyHead& head = config.heads[size_of(h)];
        std::vector<float> turned(size_of(dim));
        std::copy_n(config.mean_pre_rope.row(h).data(), dim, turned.begin());
        config.rope.apply(turned, position);
        const VectorD mean = config.mean.row(h).cast<double>() + Eigen::Map<const VectorF>(turned.data(), dim).cast<double>();
        const VectorD x = Eigen::Map<const VectorF>(row.data() + h * dim, dim).cast<double>() - mean;
        const VectorD z = x * head.transform.cast<double>();
        const HeadCode code = read_head(config, h, bytes);
        EXPECT_TRUE(search_may_end_at(code.gain, head, z, norm_of(head, z))) << code.gain;
        VectorD coded = VectorD::Zero(dim);
        for (int d = 0; d < dim; ++d) {
          const int width = head.width[size_of(d)];
          if (width == 0) continue;
          const int levels = 1 << width;
          const double step = gain_of(code.gain) * static_cast<double>(head.step[size_of(d)]);
          const double y = z[d] / step;
          const double expected = std::clamp(std::floor(y + levels / 2.0), 0.0, levels - 1.0);
          if (std::abs(y - std::round(y)) > kNearEdge) {
            EXPECT_EQ(code.codes[size_of(d)], static_cast<int>(expected)) << d;
          }
          coded[d] = step * (code.codes[size_of(d)] - (levels - 1) / 2.0);
        }
        const VectorD expected = coded * head.inverse.cast<double>() + mean;
        const VectorD got = Eigen::Map<const VectorF>(decoded.data() + h * dim, dim).cast<double>();
        EXPECT_LT((got - expected).norm(), 1e-5 * expected.norm());
      }
    }
  }
}

// The attention seam: what attention computes in the inner basis equals what it would compute on decoded rows.
TEST(SpectralKey, InnerBasisGivesTheLogitsOfDecodedRows) {
  for (const int dim : kHeadSizes) {
    for (const int mode : {0, 1, 2}) {  // no mean, static, static and RoPE
      const int heads = 2;
      SpectralKeyConfig config = random_config(heads, dim);
      const auto values = size_of(heads * dim);
      if (mode > 0) config.mean = matrix_of(gaussian(values, 41, 3.0F), heads);
      if (mode == 2) {
        config.mean_pre_rope = matrix_of(gaussian(values, 42, 3.0F), heads);
        config.rope = rope_of(RopePairing::neox, dim, dim);
      }
      const auto codec = make_spectral_key_codec(config);
      const std::int64_t position = 123;
      const std::vector<std::uint8_t> code = encode(*codec, gaussian(values, 51), position);
      const std::vector<float> decoded = decode(*codec, code, position);
      for (int h = 0; h < heads; ++h) {
        const std::vector<float> q = gaussian(size_of(dim), 61U + static_cast<unsigned>(h));
        std::vector<float> inner_q(q.size(), kNan);
        std::vector<float> inner_k(q.size(), kNan);
        codec->query_to_inner(h, q, inner_q);
        codec->decode_inner(h, code, inner_k);
        const KeyMean mean = codec->key_mean(h);
        EXPECT_EQ(mean.empty(), mode == 0);
        EXPECT_EQ(mean.offset.empty(), mode == 0);
        ASSERT_EQ(mean.rope != nullptr, mode == 2);
        double logit = dot(inner_q, inner_k);
        if (!mean.offset.empty()) logit += dot(q, mean.offset);
        if (mean.rope != nullptr) {
          std::vector<float> turned(mean.pre_rope.begin(), mean.pre_rope.end());
          mean.rope->apply(turned, position);
          logit += dot(q, turned);
        }
        const std::span<const float> row = std::span(decoded).subspan(size_of(h * dim), q.size());
        const double size = std::sqrt(dot(q, q) * dot(row, row));
        EXPECT_NEAR(logit, dot(q, row), 2e-6 * size) << "dim " << dim << " mode " << mode << " head " << h;
      }
    }
  }
}

class SpectralKeyMean : public testing::TestWithParam<RopePairing> {};

// Keys of a bias 100 times their variation have the same relative error as keys without it.
TEST_P(SpectralKeyMean, RopeMeanIsTakenOutAndPutBackAtEveryPosition) {
  const int heads = 2;
  for (const int dim : {64, 80, 128}) {
    SpectralKeyConfig config = config_of({plain_head(dim, 2), plain_head(dim, 2)});
    config.rope = rope_of(GetParam(), dim - 16, dim);  // partial rotary: the last 16 coordinates keep their mean
    const auto values = size_of(heads * dim);
    const std::vector<float> mu = gaussian(values, 31, 100.0F);
    const auto without = make_spectral_key_codec(config);
    config.mean_pre_rope = matrix_of(mu, heads);
    const auto with_mean = make_spectral_key_codec(config);
    for (const std::int64_t position : {0, 1, 777, 100000}) {
      const std::vector<float> noise = gaussian(values, 99U + static_cast<unsigned>(position));
      std::vector<float> row = mu;
      for (int h = 0; h < heads; ++h) config.rope.apply(std::span(row).subspan(size_of(h * dim), size_of(dim)), position);
      const std::vector<float> bias = row;
      for (std::size_t i = 0; i < row.size(); ++i) row[i] += noise[i];
      const auto error = [&](const Codec& codec) {
        std::vector<float> out = round_trip(codec, row, position);
        for (std::size_t i = 0; i < out.size(); ++i) out[i] -= bias[i];
        return relative_error(out, noise);
      };
      const double expected = relative_error(round_trip(*without, noise, position), noise);
      EXPECT_NEAR(error(*with_mean), expected, 0.02 * expected) << position;
      EXPECT_GT(error(*without), 100.0) << position;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pairings, SpectralKeyMean, testing::Values(RopePairing::norm, RopePairing::neox));

TEST(SpectralKey, WithoutRopeTheMeanIsAConstant) {
  const int dim = 64;
  SpectralKeyConfig config = config_of({plain_head(dim, 2)});
  const std::vector<float> mu = gaussian(size_of(dim), 3, 100.0F);
  config.mean = matrix_of(mu, 1);
  const auto codec = make_spectral_key_codec(config);
  EXPECT_TRUE(codec->key_mean(0).pre_rope.empty());
  EXPECT_EQ(codec->key_mean(0).rope, nullptr);
  ASSERT_EQ(codec->key_mean(0).offset.size(), size_of(dim));
  EXPECT_EQ(codec->key_mean(0).offset[5], mu[5]);
  std::vector<float> row = gaussian(size_of(dim), 4);
  const std::vector<float> noise = row;
  for (std::size_t i = 0; i < row.size(); ++i) row[i] += mu[i];
  std::vector<float> out = round_trip(*codec, row, 9);
  EXPECT_EQ(encode(*codec, row, 9), encode(*codec, row, 100));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] -= mu[i];
  const double error = relative_error(out, noise);
  EXPECT_LT(error, 0.2);
  EXPECT_GT(error, 0.08);
}

TEST(SpectralKey, ARowThatIsItsMeanDecodesToIt) {
  const int dim = 96;
  SpectralKeyConfig config = random_config(1, dim);
  const std::vector<float> zeros(size_of(dim));
  const auto plain = make_spectral_key_codec(config);
  const std::vector<std::uint8_t> code = encode(*plain, zeros);
  EXPECT_THAT(code, testing::Each(0));
  EXPECT_EQ(decode(*plain, code), zeros);
  config.mean = matrix_of(gaussian(size_of(dim), 8, 4.0F), 1);
  config.mean_pre_rope = matrix_of(gaussian(size_of(dim), 9, 4.0F), 1);
  config.rope = rope_of(RopePairing::neox, dim, dim);
  std::vector<float> mean(config.mean_pre_rope.data(), config.mean_pre_rope.data() + dim);
  config.rope.apply(mean, 555);
  for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += config.mean.data()[d];
  EXPECT_LT(relative_error(round_trip(*make_spectral_key_codec(config), mean, 555), mean), 1e-4);
}

// What no cache should hold must still give finite rows, and be counted.
TEST(SpectralKey, C3_RowsOfAnySizeStayFinite) {
  for (const int dim : kHeadSizes) {
    const SpectralKeyConfig config = random_config(2, dim);
    const auto codec = make_spectral_key_codec(config);
    for (const float value : {0.0F, 9.0F, -9.0F, 1e-30F, 65504.0F, -65504.0F, 1e30F, -3e38F}) {
      const std::vector<float> constant(size_of(2 * dim), value);
      std::vector<float> mixed = gaussian(constant.size(), 3);
      for (float& x : mixed) x = std::clamp(x, -1.0F, 1.0F) * value;
      for (const std::vector<float>& row : {constant, mixed}) {
        EncodeStats stats;
        const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
        EXPECT_TRUE(all_finite(decode(*codec, code))) << value;
        EXPECT_EQ(stats.sanitised, 0U);
        if (std::fabs(value) < 1e4F) continue;
        EXPECT_GE(stats.saturated, 2U) << "dim " << dim << " value " << value;
        // Far too small, but not nothing. From 2^24 steps on a code is less than the rounding of its coordinate, and all gains
        // of the search cost the same.
        const int least = std::fabs(value) < 1e6F ? 255 : 255 - 18;
        EXPECT_GE(code.back(), least) << "dim " << dim << " value " << value;
        EXPECT_GE(code[code.size() - 2], least) << "dim " << dim << " value " << value;
      }
    }
    std::vector<float> spiked = gaussian(size_of(2 * dim), 4);
    spiked[3] = 1e30F;
    EncodeStats stats;
    EXPECT_TRUE(all_finite(decode(*codec, encode(*codec, spiked, 0, stats))));
    EXPECT_GT(stats.saturated, 0U);
  }
}

TEST(SpectralKey, C3_SumsBeyondBinary32DecodeToTheMean) {
  SpectralKeyHead head = plain_head(64, 2);
  head.transform *= 0x1p50F;
  head.inverse *= 0x1p-50F;
  const auto codec = make_spectral_key_codec(config_of({head}));
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, std::vector<float>(64, 1e10F), 0, stats);
  EXPECT_THAT(code, testing::Each(0));
  EXPECT_EQ(stats.saturated, 1U);
}

TEST(SpectralKey, C4_NaNAndInfAreReplacedByZeroAndCounted) {
  const SpectralKeyConfig config = random_config(2, 64);
  const auto codec = make_spectral_key_codec(config);
  std::vector<float> row = gaussian(128, 12);
  std::vector<float> clean = row;
  row[5] = kNan;
  row[6] = kInf;
  row[70] = -kInf;
  clean[5] = clean[6] = clean[70] = 0.0F;
  EncodeStats dirty_stats;
  EncodeStats clean_stats;
  EXPECT_EQ(encode(*codec, row, 0, dirty_stats), encode(*codec, clean, 0, clean_stats));
  EXPECT_EQ(dirty_stats.sanitised, 1U);
  EXPECT_EQ(clean_stats.sanitised, 0U);
  EXPECT_EQ(dirty_stats.saturated, clean_stats.saturated);
  EXPECT_TRUE(all_finite(round_trip(*codec, std::vector<float>(128, kNan))));
}

TEST(SpectralKey, CodesDependOnTheRowAndItsPositionOnly) {
  SpectralKeyConfig config = random_config(2, 64);
  config.mean_pre_rope = MatrixF::Constant(2, 64, 2.0F);
  config.rope = rope_of(RopePairing::neox, 64, 64);
  const auto a = make_spectral_key_codec(config);
  const auto b = make_spectral_key_codec(config);
  const std::vector<float> row = gaussian(128, 7);
  const auto first = encode(*a, row, 10);
  (void)encode(*a, gaussian(128, 8), 11);
  EXPECT_EQ(encode(*a, row, 10), first);
  EXPECT_EQ(encode(*b, row, 10), first);
  EXPECT_NE(encode(*a, row, 11), first);
}

TEST(SpectralKey, MidRiseHasAnEdgeAtZero) {
  EXPECT_EQ(mid_rise(0.0F, 2).code, 2);
  EXPECT_EQ(mid_rise(-1e-3F, 2).code, 1);
  EXPECT_EQ(mid_rise(-2.0F, 2).code, 0);
  EXPECT_FALSE(mid_rise(-2.0F, 2).saturated);
  EXPECT_EQ(mid_rise(1.999F, 2).code, 3);
  EXPECT_FALSE(mid_rise(1.999F, 2).saturated);
  for (const float y : {2.0F, 1e30F, kInf}) {
    EXPECT_EQ(mid_rise(y, 2).code, 3);
    EXPECT_TRUE(mid_rise(y, 2).saturated);
  }
  for (const float y : {-2.001F, -kInf, kNan}) {
    EXPECT_EQ(mid_rise(y, 2).code, 0);
    EXPECT_TRUE(mid_rise(y, 2).saturated);
  }
  EXPECT_EQ(mid_rise(-0.5F, 1).code, 0);
  EXPECT_EQ(mid_rise(0.5F, 1).code, 1);
  EXPECT_EQ(mid_rise(127.5F, 8).code, 255);
}

void expect_refused(const std::function<void(SpectralKeyConfig&)>& change, const char* message) {
  SpectralKeyConfig config = config_of({plain_head(64, 2), plain_head(64, 2)});
  (void)make_spectral_key_codec(config);
  change(config);
  try {
    (void)make_spectral_key_codec(config);
    ADD_FAILURE() << "accepted, expected: " << message;
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::StartsWith("spectral: "), testing::HasSubstr(message)));
  }
}

TEST(SpectralKey, C5_BadConfigurationsAreRefusedByName) {
  using Config = SpectralKeyConfig;
  expect_refused([](Config& c) { c.n_head_kv = 0; }, "n_head_kv is 0");
  expect_refused([](Config& c) { c.n_head_kv = 3; }, "2 heads are described; n_head_kv is 3");
  expect_refused([](Config& c) { c.head_dim = 0; }, "head_dim is 0");
  expect_refused([](Config& c) { c.head_dim = 66; }, "head_dim is 66; it must be a multiple of 4");
  expect_refused([](Config& c) { c.head_dim = 2048; }, "head_dim is 2048");
  expect_refused([](Config& c) { c.heads[1] = plain_head(32, 2); }, "head 1: a transform is 32 x 32; head_dim is 64");
  expect_refused([](Config& c) { c.heads[1].inverse = MatrixF::Identity(64, 60); }, "head 1: a transform is 64 x 60");
  expect_refused([](Config& c) { c.heads[0].transform(3, 4) = kNan; }, "head 0: a transform contains NaN");
  expect_refused([](Config& c) { c.heads[0].inverse(3, 4) = kInf; }, "head 0: a transform contains NaN or Inf");
  expect_refused([](Config& c) { c.heads[0].inverse *= 1.02F; }, "is not the inverse");
  expect_refused([](Config& c) { c.heads[0].transform.setZero(); }, "is not the inverse");
  expect_refused([](Config& c) { c.heads[1].width.pop_back(); }, "head 1: widths, steps and sigmas must have 64 entries");
  expect_refused([](Config& c) { c.heads[1].step.pop_back(); }, "must have 64 entries");
  expect_refused([](Config& c) { c.heads[1].inverse_sigma.pop_back(); }, "must have 64 entries");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 3); }, "width 3 is not 0, 2, 4, 6 or 8");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 10); }, "width 10");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, -2); }, "width -2");
  expect_refused([](Config& c) { c.heads[0].width[5] = 4; }, "the coordinates of a quad have different widths");
  expect_refused([](Config& c) { std::fill_n(c.heads[0].width.begin(), 4, 4); }, "68 digits are not a multiple of 16");
  for (const float step : {0.0F, -1.0F, kInf, kNan}) {
    expect_refused([&](Config& c) { c.heads[0].step[9] = step; }, "a step is not positive and finite");
  }
  for (const float sigma : {-1.0F, kInf, kNan}) {
    expect_refused([&](Config& c) { c.heads[0].inverse_sigma[9] = sigma; }, "a sigma is not");
  }
  expect_refused([](Config& c) { c.mean = MatrixF::Zero(1, 64); }, "the static mean is 1 x 64");
  expect_refused([](Config& c) { c.mean = MatrixF::Constant(2, 64, kNan); }, "the static mean contains NaN");
  expect_refused([](Config& c) { c.mean_pre_rope = MatrixF::Zero(2, 32); }, "the pre-RoPE mean is 2 x 32");
  expect_refused([](Config& c) { c.mean_pre_rope = MatrixF::Zero(2, 64); }, "needs the layer's RoPE");
}

TEST(SpectralKey, C5_ValidExtremesWork) {
  SpectralKeyHead empty = plain_head(64, 0);  // all of its digits went to other heads
  SpectralKeyHead full = plain_head(64, 8);
  std::fill(full.inverse_sigma.begin(), full.inverse_sigma.end(), 0.0F);  // nothing to take a norm of
  const auto codec = make_spectral_key_codec(config_of({empty, full}));
  EXPECT_EQ(codec->row_bytes(), 0U + 64 + 2);
  const std::vector<float> row = gaussian(128, 4, 1e-3F);
  const std::vector<float> out = round_trip(*codec, row);
  for (std::size_t d = 0; d < 64; ++d) EXPECT_EQ(out[d], 0.0F);
  EXPECT_TRUE(all_finite(out));
  EXPECT_EQ(codec->head_dim(), 64);
  EXPECT_EQ(codec->n_head_kv(), 2);
}

TEST(SpectralKey, WrongRowSizesAreRefused) {
  const auto codec = make_spectral_key_codec(config_of({plain_head(64, 2)}));
  EncodeStats stats;
  std::vector<std::uint8_t> code(codec->row_bytes());
  std::vector<float> row(64);
  EXPECT_THROW(codec->encode(std::vector<float>(63), 0, code, stats), Error);
  EXPECT_THROW(codec->decode(std::span(code).first(code.size() - 1), 0, row), Error);
  EXPECT_THROW(codec->inner_to_output(0, row, 1.0, row), Error);
}

}  // namespace
}  // namespace oscar

// A row coded by the tables, operation by operation as their comment says, has the bytes of the codec.
#include "oscar/paged/encode_tables.h"

#include <bit>

#include "oscar/paged/spectral_pages.h"
#include "spectral_layer.h"

namespace oscar::paged {
namespace {

using test::size_of;

struct Coded {
  std::vector<int> code;  // [D], stored order
  int gain = 0;
};

int gain_byte_of(float g, const EncodeTables& t) {
  if (!(g > 0.0F)) return 0;
  int exponent = 0;
  const float mantissa = std::frexp(g, &exponent);
  const auto reached = std::count_if(t.gain_edge.begin(), t.gain_edge.end(), [&](float e) { return mantissa >= e; });
  return std::clamp(128 + 16 * (exponent - 1) + static_cast<int>(reached), 1, 255);
}

Coded code_key(const EncodeTables& t, int head, std::vector<float> x, int position) {
  const int dim = t.head_dim;
  for (int d = 0; d < dim; ++d) {
    x[size_of(d)] -= t.offset(head, d);
    x[size_of(d)] -= t.rest(head, d);
  }
  for (std::size_t i = 0; i < t.theta.size(); ++i) {
    const double angle = position * t.theta[i];
    const auto c = static_cast<float>(std::cos(angle) * t.magnitude);
    const auto s = static_cast<float>(std::sin(angle) * t.magnitude);
    const float m1 = t.mean_first(head, static_cast<Eigen::Index>(i));
    const float m2 = t.mean_second(head, static_cast<Eigen::Index>(i));
    x[t.pair_first[i]] -= m1 * c - m2 * s;
    x[t.pair_second[i]] -= m1 * s + m2 * c;
  }
  std::vector<float> z(size_of(dim), 0.0F);
  float squares = 0.0F;
  for (int j = 0; j < dim; ++j) {
    for (int d = 0; d < dim; ++d) z[size_of(j)] += x[size_of(d)] * t.transform[size_of(head)](d, j);
    const float ratio = z[size_of(j)] * t.coordinate[size_of(head)][size_of(j)].inverse_sigma;
    squares += ratio * ratio;
  }
  const float norm = std::max(kSpectralMinNorm, std::sqrt(squares / static_cast<float>(t.norm_count[size_of(head)])));
  const float factor = 1.0F / norm;
  Coded coded{std::vector<int>(size_of(dim), 0)};
  float energy = 0.0F;
  float product = 0.0F;
  for (int j = 0; j < dim; ++j) {
    const KeyCoordinate& c = t.coordinate[size_of(head)][size_of(j)];
    if (c.centre == 0.0F) continue;
    const float y = z[size_of(j)] * factor * c.inverse_step;
    const int code = mid_rise(y, static_cast<int>(std::bit_width(static_cast<unsigned>(2.0F * c.centre)))).code;
    coded.code[size_of(j)] = code;
    energy += y * y * c.weight;
    product += y * (static_cast<float>(code) - c.centre) * c.weight;
  }
  coded.gain = product > 0.0F && std::isfinite(energy) ? gain_byte_of(norm * (energy / product), t) : 0;
  return coded;
}

Coded code_value(const EncodeTables& t, int head, const std::vector<float>& x) {
  const int dim = t.head_dim;
  std::vector<float> y(size_of(dim), 0.0F);
  float energy = 0.0F;
  for (unsigned j = 0; j < static_cast<unsigned>(dim); ++j) {
    for (unsigned d = 0; d < static_cast<unsigned>(dim); ++d) {
      const float term = x[d] * t.value_factor(head, static_cast<Eigen::Index>(d));
      y[j] += std::popcount(d & j) % 2 == 1 ? -term : term;
    }
    energy += y[j] * y[j];
  }
  Coded coded{std::vector<int>(size_of(dim), 0)};
  const float factor = std::sqrt(static_cast<float>(dim) / energy);
  if (!(energy > 0.0F) || !std::isfinite(factor)) return coded;
  float product = 0.0F;
  for (int j = 0; j < dim; ++j) {
    const float u = y[size_of(j)] * factor;
    coded.code[size_of(j)] = mid_rise(u * t.value_inverse_step, 2).code;
    product += u * t.value_level[size_of(coded.code[size_of(j)])];
  }
  coded.gain = gain_byte_of(static_cast<float>(dim) / (factor * product) / t.value_scale[size_of(head)], t);
  return coded;
}

TEST(EncodeTables, CodeTheBytesOfTheCodec) {
  const int heads = 2;
  for (const int dim : {64, 128, 256}) {
    test::SpectralLayer layer = test::spectral_layer(heads, dim, 31, RopePairing::norm, dim / 2);
    if (dim == 64) layer.keys.mean.resize(0, 0);
    if (dim == 256) layer.keys.mean_pre_rope.resize(0, 0);
    const EncodeTables tables = encode_tables(layer.keys, layer.values);
    const SpectralTables pages = spectral_tables(layer.keys, layer.values);
    const auto keys = make_spectral_key_codec(layer.keys);
    const auto values = make_spectral_value_codec(layer.values);
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    for (const int position : {0, 1, 77, 30000, 131071}) {
      std::vector<float> row(size_of(heads * dim));
      const float size = position == 77 ? 1e-6F : 1.0F;
      for (float& x : row) x = size * normal(rng);
      if (position == 1) std::fill_n(row.begin(), dim, 0.0F);
      const std::vector<std::uint8_t> k = test::encode(*keys, row, position);
      const std::vector<std::uint8_t> v = test::encode(*values, row, position);
      std::size_t at = 0;
      for (int h = 0; h < heads; ++h) {
        const std::vector<float> x(row.begin() + h * dim, row.begin() + (h + 1) * dim);
        const Coded key = code_key(tables, h, x, position);
        const std::vector<std::uint16_t>& source = pages.slot_source[size_of(h)];
        for (std::size_t s = 0; s < source.size(); ++s, ++at) {
          const int digit = (k[at / 4] >> (2 * (at % 4))) & 3;
          ASSERT_EQ((key.code[source[s] % 4096U] >> (2 * (source[s] / 4096U))) & 3, digit) << dim << " " << position;
        }
        EXPECT_EQ(key.gain, k[k.size() - size_of(heads - h)]);
        const Coded value = code_value(tables, h, x);
        for (int d = 0; d < dim; ++d) {
          const std::size_t digit = size_of(h * dim + d);
          ASSERT_EQ(value.code[size_of(d)], (v[digit / 4] >> (2 * (digit % 4))) & 3) << dim << " " << position;
        }
        EXPECT_EQ(value.gain, v[v.size() - size_of(heads - h)]);
      }
    }
  }
}

TEST(EncodeTables, RefuseWhatPagesCannotHold) {
  test::SpectralLayer layer = test::spectral_layer(1, 64, 5);
  layer.values.bits = 3;
  EXPECT_THROW(static_cast<void>(encode_tables(layer.keys, layer.values)), Error);
}

}  // namespace
}  // namespace oscar::paged

// A row coded by the tables, operation by operation as their comment says, has the bytes of the codec.
#include "oscar/paged/encode_tables.h"

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "oscar/paged/spectral_pages.h"
#include "spectral_layer.h"

namespace oscar::paged {
namespace {

using test::size_of;

struct Coded {
  std::vector<int> code;  // [D], stored order
  int gain = 0;
};

template <std::size_t kParts>
int gain_of(float g, const std::array<float, kParts>& edges, int one, int most) {
  if (!(g > 0.0F)) return 0;
  int exponent = 0;
  const float mantissa = std::frexp(g, &exponent);
  const auto reached = std::count_if(edges.begin(), edges.end(), [&](float e) { return mantissa >= e; });
  return std::clamp(one + static_cast<int>(kParts) * (exponent - 1) + static_cast<int>(reached), 1, most);
}

int width_of(const KeyCoordinate& c) { return static_cast<int>(std::bit_width(static_cast<unsigned>(2.0F * c.centre))); }

// Four neighbours as (a + b) + (c + d), then the upper half of the quads on the lower half; missing quads are 0.
float ordered_sum(const std::vector<float>& terms) {
  std::vector<float> quads(std::bit_ceil(terms.size() / 4), 0.0F);
  for (std::size_t i = 0; i < terms.size(); i += 4) {
    quads[i / 4] = (terms[i] + terms[i + 1]) + (terms[i + 2] + terms[i + 3]);
  }
  for (std::size_t half = quads.size() / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) quads[i] += quads[i + half];
  }
  return quads[0];
}

float cost_of(const std::vector<KeyCoordinate>& coordinate, const std::vector<float>& z, float energy, float gain) {
  const float factor = 1.0F / gain;
  std::vector<float> error(z.size(), 0.0F);
  std::vector<float> radial(z.size(), 0.0F);
  for (std::size_t j = 0; j < z.size(); ++j) {
    const KeyCoordinate& c = coordinate[j];
    if (c.centre == 0.0F) continue;
    const float y = z[j] * factor * c.inverse_step;
    const float off = static_cast<float>(mid_rise(y, width_of(c)).code) - c.centre - y;
    error[j] = off * off * c.weight;
    radial[j] = y * off * c.weight;
  }
  const float r = ordered_sum(radial);
  return (ordered_sum(error) + 4.0F * r * (r / (energy * factor * factor))) * (gain * gain);
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
  Coded coded{std::vector<int>(size_of(dim), 0)};
  std::vector<float> terms(size_of(dim), 0.0F);
  for (std::size_t j = 0; j < terms.size(); ++j) {
    if (t.coordinate[size_of(head)][j].centre > 0.0F) terms[j] = z[j] * z[j];
  }
  const float energy = ordered_sum(terms);
  if (!(energy > 0.0F) || !std::isfinite(energy) || !std::isfinite(squares)) return coded;
  const int first = gain_of(norm, t.key_gain_edge, 128, 255);
  coded.gain = first;
  float least = std::numeric_limits<float>::infinity();
  const auto look_at = [&](int byte) {
    if (byte < 1 || byte > 255) return;
    const float cost = cost_of(t.coordinate[size_of(head)], z, energy, t.gain[size_of(byte)]);
    if (!(cost < least)) return;
    least = cost;
    coded.gain = byte;
  };
  for (int k = -16; k <= 12; k += 4) look_at(first + k);
  const int middle = coded.gain;
  for (const int k : {-2, -1, 1, 2}) look_at(middle + k);
  const float factor = 1.0F / t.gain[size_of(coded.gain)];
  for (std::size_t j = 0; j < z.size(); ++j) {
    const KeyCoordinate& c = t.coordinate[size_of(head)][j];
    coded.code[j] = mid_rise(z[j] * factor * c.inverse_step, width_of(c)).code;
  }
  return coded;
}

Coded code_value(const EncodeTables& t, int head, const std::vector<float>& x, int position) {
  const int dim = t.head_dim;
  const int pattern = position / 64 % 4;
  std::vector<float> y(size_of(dim), 0.0F);
  float energy = 0.0F;
  for (unsigned j = 0; j < static_cast<unsigned>(dim); ++j) {
    for (unsigned d = 0; d < static_cast<unsigned>(dim); ++d) {
      const float term = x[d] * t.value_factor(pattern * t.n_head_kv + head, static_cast<Eigen::Index>(d));
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
  const int gain =
      gain_of(static_cast<float>(dim) / (factor * product) / t.value_scale[size_of(head)], t.value_gain_edge, 40, 63);
  coded.gain = gain == 0 ? 0 : gain + 64 * pattern;
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
    std::set<int> gains, value_gains;
    struct Case {
      int position;
      float size;  // from nothing over all that gains reach to where costs are mere rounding
    };
    const Case cases[] = {{0, 1.0F},   {1, 0.0F},  {3, 1.0F},   {77, 1e-6F}, {30000, 1.0F}, {131071, 1.0F},
                          {4, 5e-3F},  {5, 0.03F}, {6, 10.0F},  {7, 100.0F}, {8, 400.0F},   {9, 3e3F},
                          {10, 3e10F}, {70, 1.0F}, {130, 2.0F}, {200, 0.5F}, {255, 4.0F}};
    for (const auto& [position, size] : cases) {
      std::vector<float> row(size_of(heads * dim));
      for (float& x : row) x = size * normal(rng);
      if (dim == 256) {  // about its mean
        for (std::size_t i = 0; i < row.size(); ++i) row[i] += layer.keys.mean.data()[i];
      }
      for (int h = 0; position == 3 && h < heads; ++h) {  // a large coordinate with few codes: the search ends at its last gain
        const SpectralKeyHead& head = layer.keys.heads[size_of(h)];
        const auto narrow = std::find(head.width.begin(), head.width.end(), 2) - head.width.begin();
        for (int d = 0; d < dim; ++d) row[size_of(h * dim + d)] += 30.0F * head.inverse(narrow, d);
      }
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
        EXPECT_EQ(key.gain, k[k.size() - size_of(heads - h)]) << dim << " " << position;
        gains.insert(key.gain);
        const Coded value = code_value(tables, h, x, position);
        for (int d = 0; d < dim; ++d) {
          const std::size_t digit = size_of(h * dim + d);
          ASSERT_EQ(value.code[size_of(d)], (v[digit / 4] >> (2 * (digit % 4))) & 3) << dim << " " << position;
        }
        EXPECT_EQ(value.gain, v[v.size() - size_of(heads - h)]) << dim << " " << position;
        value_gains.insert(value.gain);
      }
    }
    EXPECT_EQ(gains.count(0), dim == 256 ? 1U : 0U) << dim;
    EXPECT_EQ(gains.count(1), dim == 256 ? 1U : 0U) << dim;
    EXPECT_EQ(gains.count(255), 1U) << dim;
    EXPECT_GE(gains.size(), 12U) << dim;
    for (const int gain : {0, 1, 64 + 1}) EXPECT_EQ(value_gains.count(gain), dim == 256 ? 0U : 1U) << dim << " " << gain;
    EXPECT_EQ(value_gains.count(63), 1U) << dim;
    std::set<int> patterns;
    for (const int gain : value_gains) patterns.insert(gain / 64);
    EXPECT_EQ(patterns.size(), 4U) << dim;
  }
}

TEST(EncodeTables, GainsAreThoseOfTheBytes) {
  const test::SpectralLayer layer = test::spectral_layer(1, 64, 5);
  const EncodeTables tables = encode_tables(layer.keys, layer.values);
  const auto keys = make_spectral_key_codec(layer.keys);
  const auto& decoded = keys->code_form(0)->gain;
  for (int n = 1; n < 256; ++n) {
    EXPECT_EQ(tables.gain[size_of(n)], static_cast<float>(std::exp2((n - 128) / 16.0))) << n;
    EXPECT_EQ(tables.gain[size_of(n)], decoded[size_of(n)]) << n;
  }
}

TEST(EncodeTables, RefuseWhatPagesCannotHold) {
  test::SpectralLayer layer = test::spectral_layer(1, 64, 5);
  layer.values.bits = 3;
  EXPECT_THROW(static_cast<void>(encode_tables(layer.keys, layer.values)), Error);
}

}  // namespace
}  // namespace oscar::paged

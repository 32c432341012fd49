#include "oscar/attention/importance_collector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "attention/attended_layer.h"
#include "method/same_importance.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

using test::AttendedLayer;

constexpr ImportanceConfig kSmall{4, 24, 2048};

LayerShape shape_of(RopePairing pairing, int n_rot) {
  LayerShape shape = test::layer_shape(3, 4, 2, 16, pairing);
  shape.v_dim = 12;
  shape.rope.n_rot = n_rot;
  shape.rope.attn_factor = 1.25F;
  return shape;
}

VectorD turn(const VectorD& row, const Rope& rope, std::int64_t by, double magnitude = 1.0) {
  VectorD turned = row;
  for (std::size_t pair = 0; pair < rope.theta().size(); ++pair) {
    const auto first = static_cast<Eigen::Index>(rope.first_of(pair));
    const auto second = static_cast<Eigen::Index>(rope.second_of(pair));
    const double angle = static_cast<double>(by) * rope.theta()[pair];
    turned[first] = magnitude * (row[first] * std::cos(angle) - row[second] * std::sin(angle));
    turned[second] = magnitude * (row[first] * std::sin(angle) + row[second] * std::cos(angle));
  }
  return turned;
}

// The statistics of one KV head straight from the definitions in importance.h, in double.
struct Direct {
  MatrixD metric, joint;
  double pair_weight = 0, output_energy = 0;
  std::vector<double> key_weight;    // [n] w_.j
  std::vector<double> token_weight;  // [coded keys] t_j

  Direct(const AttendedLayer& a, int head, const ImportanceConfig& config) {
    const Rope rope(a.shape.rope, a.shape.k_dim);
    const Eigen::Index dim = a.shape.k_dim;
    const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
    metric = MatrixD::Zero(dim, dim);
    joint = MatrixD::Zero(dim + 2 * pairs + 1, dim + 2 * pairs + 1);
    key_weight.assign(static_cast<std::size_t>(a.n), 0.0);
    for (int g = 0; g < a.group(); ++g) weigh(a, head * a.group() + g, config, rope);

    const std::int64_t begin = config.sink;
    const std::int64_t end = a.n - config.recent;
    double mean = 0;
    for (std::int64_t j = begin; j < end; ++j)
      mean += key_weight[static_cast<std::size_t>(j)] / static_cast<double>(end - begin);
    for (std::int64_t j = begin; j < end; ++j) {
      token_weight.push_back(0.5 * key_weight[static_cast<std::size_t>(j)] / mean + 0.5);
      const int copies = pairs > 0 ? 2 : 1;
      for (int copy = 0; copy < copies; ++copy) {
        const VectorD row = joint_row(a, rope, head, j, copy == 0 ? 0 : position_mix_offset(j, 0));
        joint += token_weight.back() / copies * row.transpose() * row;
      }
    }
  }

  void weigh(const AttendedLayer& a, int query_head, const ImportanceConfig& config, const Rope& rope) {
    for (std::int64_t i = config.sink + config.recent; i < a.n; ++i) {
      const std::vector<double> p = a.probabilities(i, query_head);
      double of_query = 0;
      VectorD o(a.shape.v_dim);
      for (int d = 0; d < a.shape.v_dim; ++d) o[d] = a.output(i, query_head, d);
      if (a.metric) {
        const Eigen::Map<const MatrixF> m(a.metric->data() + query_head * o.size() * o.size(), o.size(), o.size());
        output_energy += (o * m.cast<double>()).dot(o);
      } else {
        output_energy += o.squaredNorm();
      }
      for (std::int64_t j = config.sink; j <= i - config.recent; ++j) {
        VectorD e(a.shape.v_dim);
        for (int d = 0; d < a.shape.v_dim; ++d) e[d] = a.value(j, query_head / a.group(), d) - a.output(i, query_head, d);
        double square = e.squaredNorm();
        if (a.metric) {
          const Eigen::Map<const MatrixF> m(a.metric->data() + query_head * e.size() * e.size(), e.size(), e.size());
          square = (e * m.cast<double>()).dot(e);
        }
        const double w = p[static_cast<std::size_t>(j)] * p[static_cast<std::size_t>(j)] * square;
        of_query += w;
        key_weight[static_cast<std::size_t>(j)] += w;
      }
      pair_weight += of_query;
      VectorD q(a.shape.k_dim);
      for (int d = 0; d < a.shape.k_dim; ++d) q[d] = static_cast<double>(a.scale) * a.query(i, query_head, d);
      metric += of_query * (rope.theta().empty() ? 1.0 : 0.5) * q.transpose() * q;
      for (int copy = 0; copy < 2 && !rope.theta().empty(); ++copy) {
        const VectorD turned = turn(q, rope, position_mix_offset(i, copy));
        metric += of_query * 0.25 * turned.transpose() * turned;
      }
    }
  }

  static VectorD key_of(const AttendedLayer& a, int head, std::int64_t j) {
    VectorD key(a.shape.k_dim);
    for (int d = 0; d < a.shape.k_dim; ++d) key[d] = a.key(j, head, d);
    return key;
  }
  static VectorD joint_row(const AttendedLayer& a, const Rope& rope, int head, std::int64_t j, std::int64_t offset) {
    const Eigen::Index dim = a.shape.k_dim;
    const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
    VectorD row(dim + 2 * pairs + 1);
    row.head(dim) = turn(key_of(a, head, j), rope, offset);
    for (Eigen::Index pair = 0; pair < pairs; ++pair) {
      const double angle = static_cast<double>(j + offset) * rope.theta()[static_cast<std::size_t>(pair)];
      row[dim + pair] = rope.magnitude() * std::cos(angle);
      row[dim + pairs + pair] = rope.magnitude() * std::sin(angle);
    }
    row[dim + 2 * pairs] = 1;
    return row;
  }
};

double distance(const MatrixD& a, const MatrixD& b) { return (a - b).norm() / b.norm(); }

struct Case {
  const char* name;
  RopePairing pairing;
  int n_rot;
  bool metric, softcap, sinks;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class ImportanceOf : public testing::TestWithParam<Case> {
 protected:
  static AttendedLayer layer(std::int64_t n, unsigned seed = 1) {
    const Case& c = GetParam();
    AttendedLayer a(shape_of(c.pairing, c.n_rot), n, seed);
    if (c.metric) a.draw_metric(seed + 1);
    if (c.softcap) a.softcap = 3.0F;
    if (c.sinks) a.sinks = {1.0F, -2.0F, 3.0F, 0.0F};
    a.attend();
    return a;
  }
};

INSTANTIATE_TEST_SUITE_P(Layers, ImportanceOf,
                         testing::Values(Case{"neox", RopePairing::neox, 16, false, false, false},
                                         Case{"norm", RopePairing::norm, 16, true, false, false},
                                         Case{"none", RopePairing::none, 0, true, false, false},
                                         Case{"partial", RopePairing::neox, 10, true, false, true},
                                         Case{"softcap", RopePairing::norm, 12, false, true, false},
                                         Case{"all", RopePairing::neox, 12, true, true, true}),
                         [](const auto& tested) { return std::string(tested.param.name); });

// More than one tile of keys, so that the softmax is put together from parts.
TEST_P(ImportanceOf, EqualsTheDefinition) {
  const AttendedLayer a = layer(380);
  ImportanceCollector collector(a.shape, kSmall, a.metric);
  a.feed(collector, 50);
  ASSERT_EQ(collector.heads().size(), 2U);
  for (int h = 0; h < 2; ++h) {
    SCOPED_TRACE(h);
    const HeadImportance& got = collector.heads()[static_cast<std::size_t>(h)];
    const Direct want(a, h, kSmall);
    EXPECT_NEAR(got.pair_weight, want.pair_weight, 1e-5 * want.pair_weight);
    EXPECT_NEAR(got.output_energy, want.output_energy, 1e-5 * want.output_energy);
    EXPECT_LT(distance(got.metric, want.metric), 1e-5);
    EXPECT_LT(distance(got.joint, want.joint), 1e-6);
    EXPECT_EQ(got.joint, MatrixD(got.joint.transpose()));
    EXPECT_EQ(got.tokens, 380 - 4 - 24);
    EXPECT_NEAR(got.joint(got.joint.rows() - 1, got.joint.rows() - 1), static_cast<double>(got.tokens), 1e-4);
    // Weights are far from equal: a test on flat ones would see little.
    EXPECT_GT(*std::max_element(want.token_weight.begin(), want.token_weight.end()), 3.0);
    ASSERT_EQ(got.sample_positions.size(), static_cast<std::size_t>(got.tokens));
    for (std::size_t i = 0; i < got.sample_positions.size(); ++i) {
      ASSERT_EQ(got.sample_positions[i], 4 + static_cast<int>(i));
      ASSERT_NEAR(static_cast<double>(got.sample_weights[i]), want.token_weight[i], 1e-5 * want.token_weight[i]);
      for (int d = 0; d < 16; ++d) {
        ASSERT_EQ(static_cast<double>(half_to_float(got.sample_keys[16 * i + static_cast<std::size_t>(d)])),
                  a.key(got.sample_positions[i], h, d));
      }
    }
  }
}

TEST_P(ImportanceOf, CovarianceIsThatOfKeysWithoutAnyTurnedMean) {
  const AttendedLayer a = layer(300);
  const Rope rope(a.shape.rope, a.shape.k_dim);
  ImportanceCollector collector(a.shape, kSmall, a.metric);
  a.feed(collector, 300);
  const Direct direct(a, 1, kSmall);
  for (const double strength : {0.0, 1.0, 30.0}) {
    VectorD mu0(16);
    for (Eigen::Index d = 0; d < 16; ++d) mu0[d] = strength * std::cos(2.0 * static_cast<double>(d) + 1);
    VectorD sum = VectorD::Zero(16);
    MatrixD squares = MatrixD::Zero(16, 16);
    double total = 0;
    for (std::int64_t j = 4; j < a.n - 24; ++j) {
      for (int copy = 0; copy < 2; ++copy) {
        const std::int64_t offset = copy == 0 || rope.theta().empty() ? 0 : position_mix_offset(j, 0);
        const VectorD x = turn(Direct::key_of(a, 1, j), rope, offset) - turn(mu0, rope, j + offset, rope.magnitude());
        const double w = direct.token_weight[static_cast<std::size_t>(j - 4)];
        total += w;
        sum += w * x;
        squares += w * x.transpose() * x;
      }
    }
    const VectorD mean = sum / total;
    const MatrixD expected = squares / total - mean.transpose() * mean;
    const KeyCovariance got = covariance(collector.heads()[1], rope, mu0);
    EXPECT_LT((got.mean - mean).norm(), 1e-5 * (1 + strength)) << strength;
    EXPECT_LT(distance(got.covariance, expected), 1e-5) << strength;
  }
}

TEST_P(ImportanceOf, ChunkingMattersByRoundingOnly) {
  const AttendedLayer a = layer(330);
  ImportanceCollector whole(a.shape, kSmall, a.metric);
  a.feed(whole, 330);
  for (const std::int64_t chunk : {1, 7, 64}) {
    ImportanceCollector other(a.shape, kSmall, a.metric);
    a.feed(other, chunk);
    for (std::size_t h = 0; h < 2; ++h) {
      const HeadImportance& x = other.heads()[h];
      const HeadImportance& y = whole.heads()[h];
      EXPECT_LT(distance(x.metric, y.metric), 1e-5);
      EXPECT_LT(distance(x.joint, y.joint), 1e-5);
      EXPECT_NEAR(x.pair_weight, y.pair_weight, 1e-5 * y.pair_weight);
      EXPECT_EQ(x.tokens, y.tokens);
      EXPECT_EQ(x.sample_keys, y.sample_keys);
      EXPECT_EQ(x.sample_positions, y.sample_positions);
    }
  }
}

TEST_P(ImportanceOf, HeadRangesAndThreadsDoNotMatter) {
  const AttendedLayer a = layer(200);
  ImportanceCollector whole(a.shape, kSmall, a.metric);
  a.feed(whole, 64);
  ImportanceCollector split(a.shape, kSmall, a.metric);
  std::vector<std::thread> threads;
  for (const auto& [begin, end] : {std::pair(0, 1), std::pair(1, 4)}) {  // through the first KV head's query heads
    threads.emplace_back([&, begin = begin, end = end] {
      for (std::int64_t first = 0; first < a.n; first += 64)
        split.add(a.block(first, std::min<std::int64_t>(64, a.n - first)), begin, end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  split.end_sequence();
  for (std::size_t h = 0; h < 2; ++h) test::expect_identical(split.heads()[h], whole.heads()[h]);
}

AttendedLayer plain_layer(std::int64_t n, unsigned seed) {
  AttendedLayer a(shape_of(RopePairing::neox, 16), n, seed);
  a.attend();
  return a;
}

TEST(Importance, SequencesTooShortForCodesLeaveNothing) {
  ImportanceCollector collector(shape_of(RopePairing::neox, 16), kSmall, nullptr);
  for (const std::int64_t n : {1, 4, 27, 28}) {  // the first key read as a code is key 4, by query 28
    plain_layer(n, 1).feed(collector, 10);
    for (const HeadImportance& head : collector.heads()) {
      EXPECT_FALSE(head.empty());
      EXPECT_EQ(head.tokens, 0);
      EXPECT_EQ(head.pair_weight, 0.0);
      EXPECT_EQ(head.joint.norm(), 0.0);
      EXPECT_EQ(head.metric.norm(), 0.0);
      EXPECT_TRUE(head.sample_positions.empty());
    }
  }
  const KeyCovariance nothing = covariance(collector.heads()[0], Rope(collector.shape().rope, 16), VectorD::Ones(16));
  EXPECT_EQ(nothing.covariance.norm(), 0.0);
  EXPECT_EQ(nothing.mean.norm(), 0.0);
  plain_layer(29, 1).feed(collector, 10);
  EXPECT_EQ(collector.heads()[1].tokens, 1);
  EXPECT_GT(collector.heads()[1].pair_weight, 0.0);
  EXPECT_EQ(collector.heads()[1].sample_positions, std::vector<std::int32_t>{4});
}

TEST(Importance, SequencesAddUp) {
  const AttendedLayer a = plain_layer(150, 1);
  const AttendedLayer b = plain_layer(90, 2);
  ImportanceCollector both(a.shape, kSmall, nullptr);
  a.feed(both, 64);
  plain_layer(20, 3).feed(both, 64);
  b.feed(both, 64);
  const Direct first(a, 0, kSmall);
  const Direct second(b, 0, kSmall);
  const HeadImportance& head = both.heads()[0];
  EXPECT_LT(distance(head.metric, first.metric + second.metric), 1e-5);
  EXPECT_LT(distance(head.joint, first.joint + second.joint), 1e-6);  // each with weights about its own mean
  EXPECT_EQ(head.tokens, 150 + 90 - 2 * 28);
}

TEST(Importance, SamplesStayUniformAndBounded) {
  ImportanceConfig config = kSmall;
  config.max_samples = 50;
  const AttendedLayer a = plain_layer(328, 4);  // 300 keys
  ImportanceCollector collector(a.shape, config, nullptr);
  a.feed(collector, 64);
  const auto expect_samples = [&](const std::vector<std::int32_t>& positions) {
    for (int h = 0; h < 2; ++h) {
      const HeadImportance& head = collector.heads()[static_cast<std::size_t>(h)];
      EXPECT_EQ(head.sample_positions, positions);
      ASSERT_EQ(head.sample_weights.size(), positions.size());
      ASSERT_EQ(head.sample_keys.size(), 16 * positions.size());
      for (std::size_t i = 0; i < positions.size(); ++i) {
        ASSERT_EQ(static_cast<double>(half_to_float(head.sample_keys[16 * i + 5])), a.key(positions[i], h, 5)) << i;
      }
    }
  };
  std::vector<std::int32_t> expected;
  for (int i = 0; i < 300; i += 8) expected.push_back(4 + i);  // 38 of 300: a stride of 4 would be 75
  expect_samples(expected);
  a.feed(collector, 64);  // key 304 of all is the next: the fifth of its sequence; the 51st sample doubles the stride
  expected.clear();
  for (int i = 0; i < 600; i += 16) expected.push_back(4 + i % 300);
  expect_samples(expected);
  config.max_samples = 1;
  EXPECT_THROW(ImportanceCollector(a.shape, config, nullptr), Error);
  config.max_samples = 51;  // halving an odd number would leave samples off the stride
  EXPECT_THROW(ImportanceCollector(a.shape, config, nullptr), Error);
}

TEST(Importance, MergeEqualsOneCollector) {
  const AttendedLayer a = plain_layer(150, 1);
  const AttendedLayer b = plain_layer(90, 2);
  const auto collected = [&](const std::vector<const AttendedLayer*>& layers) {
    ImportanceCollector collector(a.shape, kSmall, nullptr);
    for (const AttendedLayer* layer : layers) layer->feed(collector, 64);
    return HeadImportance(collector.heads()[1]);
  };
  const HeadImportance first = collected({&a});
  const HeadImportance second = collected({&b});
  const HeadImportance both = collected({&a, &b});
  const HeadImportance none = collected({});
  HeadImportance merged = first;
  merge(merged, second);
  EXPECT_LT(distance(merged.metric, both.metric), 1e-13);
  EXPECT_LT(distance(merged.joint, both.joint), 1e-13);
  EXPECT_NEAR(merged.pair_weight, both.pair_weight, 1e-13 * both.pair_weight);
  EXPECT_NEAR(merged.output_energy, both.output_energy, 1e-13 * both.output_energy);
  EXPECT_EQ(merged.tokens, both.tokens);
  // The limit on samples is the larger of the two counts, so both parts are thinned to the same density: 122 of 122 + 62.
  const auto from_first = std::round(122.0 * 122 / 184);
  ASSERT_EQ(merged.sample_positions.size(), static_cast<std::size_t>(from_first + std::round(62.0 * 122 / 184)));
  EXPECT_EQ(merged.sample_weights.size(), merged.sample_positions.size());
  EXPECT_EQ(merged.sample_keys.size(), 16 * merged.sample_positions.size());
  for (std::size_t i = 0; i < merged.sample_positions.size(); ++i) {
    const AttendedLayer& source = i < static_cast<std::size_t>(from_first) ? a : b;
    ASSERT_EQ(static_cast<double>(half_to_float(merged.sample_keys[16 * i + 3])), source.key(merged.sample_positions[i], 1, 3));
  }
  HeadImportance with_nothing = first;
  merge(with_nothing, none);
  test::expect_identical(with_nothing, first);
  HeadImportance from_nothing = none;
  merge(from_nothing, first);
  test::expect_identical(from_nothing, first);
  ImportanceCollector other(test::layer_shape(0, 4, 2, 32), kSmall, nullptr);
  EXPECT_THROW(merge(merged, other.heads()[0]), Error);
}

TEST(Importance, MistakesAreNamed) {
  const AttendedLayer a = plain_layer(40, 1);
  ImportanceCollector collector(a.shape, kSmall, nullptr);
  collector.add(a.block(0, 10), 0, 4);
  try {
    collector.add(a.block(20, 10), 0, 4);
    ADD_FAILURE() << "a gap was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "layer 3: importance was given position 20 after 10 positions");
  }
  const auto metric = std::make_shared<const std::vector<float>>(100);
  try {
    ImportanceCollector(a.shape, kSmall, metric);
    ADD_FAILURE() << "a metric of another shape was accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("100 values; n_head * v_dim^2 = 576"));
  }
  EXPECT_THROW(ImportanceCollector(a.shape, {-1, 24, 2048}, nullptr), Error);
  EXPECT_THROW(ImportanceCollector(a.shape, {4, -1, 2048}, nullptr), Error);
}

TEST(Importance, OffsetsAreSpreadAndAFunctionOfThePosition) {
  std::int64_t sum = 0;
  int equal = 0;
  for (std::int64_t p = 0; p < 4096; ++p) {
    for (int copy = 0; copy < 2; ++copy) {
      const std::int32_t offset = position_mix_offset(p, copy);
      EXPECT_GE(offset, 0);
      EXPECT_LT(offset, 256 * 96);
      EXPECT_EQ(offset % 96, 0);
      EXPECT_EQ(offset, position_mix_offset(p, copy));
      sum += offset;
    }
    equal += static_cast<int>(position_mix_offset(p, 0) == position_mix_offset(p, 1));
  }
  EXPECT_NEAR(static_cast<double>(sum) / 8192, 255 * 96 / 2.0, 400.0);
  EXPECT_LT(equal, 40);
}

}  // namespace
}  // namespace oscar

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "method/synthetic_layer.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

using test::Activations;
using test::collect;
using test::layer_shape;

void expect_identical(std::span<const HeadMoments> a, std::span<const HeadMoments> b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t h = 0; h < a.size(); ++h) {
    EXPECT_EQ(a[h].q_moment, b[h].q_moment);
    EXPECT_EQ(a[h].k_moment, b[h].k_moment);
    EXPECT_EQ(a[h].v_moment, b[h].v_moment);
    EXPECT_EQ(a[h].o_moment, b[h].o_moment);
    EXPECT_EQ(a[h].sst_moment, b[h].sst_moment);
    EXPECT_EQ(a[h].k_sum, b[h].k_sum);
    EXPECT_EQ(a[h].k_pre_sum, b[h].k_pre_sum);
    EXPECT_EQ(a[h].v_sum, b[h].v_sum);
    EXPECT_EQ(a[h].sst_weight, b[h].sst_weight);
    EXPECT_EQ(a[h].tokens, b[h].tokens);
    EXPECT_EQ(a[h].queries, b[h].queries);
    EXPECT_EQ(a[h].k_samples, b[h].k_samples);
    EXPECT_EQ(a[h].v_samples, b[h].v_samples);
    EXPECT_EQ(a[h].sample_positions, b[h].sample_positions);
  }
}

MatrixD direct_moment(const std::vector<const float*>& rows, int dim) {
  MatrixD sum = MatrixD::Zero(dim, dim);
  for (const float* row : rows) {
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) sum(i, j) += static_cast<double>(row[i]) * static_cast<double>(row[j]);
    }
  }
  return sum;
}

double relative_difference(const MatrixD& a, const MatrixD& b) { return (a - b).norm() / b.norm(); }

TEST(MomentCollector, EqualsDirectSums) {
  Activations a(layer_shape(0, 6, 2, 16), 150, 4);
  a.fill_normal(1);
  const MomentCollector collector = collect(a, 150);
  for (int h = 0; h < 2; ++h) {
    const HeadMoments& head = collector.heads()[static_cast<std::size_t>(h)];
    std::vector<const float*> q, k, v, o;
    for (std::int64_t t = 0; t < 150; ++t) {
      for (int i = 0; i < 3; ++i) q.push_back(a.q_row(t, 3 * h + i));
      for (int i = 0; i < 3; ++i) o.push_back(a.o_row(t, 3 * h + i));
      k.push_back(a.k_row(t, h));
      v.push_back(a.v_row(t, h));
    }
    EXPECT_LT(relative_difference(head.q_moment, direct_moment(q, 16)), 1e-13);
    EXPECT_LT(relative_difference(head.k_moment, direct_moment(k, 16)), 1e-13);
    EXPECT_LT(relative_difference(head.v_moment, direct_moment(v, 16)), 1e-13);
    EXPECT_LT(relative_difference(head.o_moment, direct_moment(o, 16)), 1e-13);
    EXPECT_EQ(head.q_moment, MatrixD(head.q_moment.transpose()));
    EXPECT_EQ(head.tokens, 150);
    EXPECT_EQ(head.queries, 450);
    double v_sum = 0;
    for (const float* row : v) v_sum += static_cast<double>(row[5]);
    EXPECT_NEAR(head.v_sum[5], v_sum, 1e-10);
  }
}

TEST(MomentCollector, B6ChunkingDoesNotMatter) {
  Activations a(layer_shape(0, 4, 2, 32), 700);
  a.fill_normal(2);
  CollectorConfig config;
  config.pilot_tokens = 200;
  config.max_samples = 50;
  const MomentCollector whole = collect(a, 700, config);
  for (const std::int64_t chunk : {1, 7, 64, 512}) expect_identical(collect(a, chunk, config).heads(), whole.heads());
}

TEST(MomentCollector, B6ThreadsDoNotMatter) {
  Activations a(layer_shape(0, 16, 8, 32), 300);
  a.fill_normal(3);
  const MomentCollector whole = collect(a, 300);
  for (const int n_threads : {2, 4, 8}) {
    MomentCollector collector(a.shape, {});
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; ++i) {
      threads.emplace_back([&, i] {
        const int per_thread = 8 / n_threads;
        for (std::int64_t begin = 0; begin < 300; begin += 100) {
          collector.add(a.block(begin, 100), i * per_thread, (i + 1) * per_thread);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    collector.finish();
    expect_identical(collector.heads(), whole.heads());
  }
}

TEST(MomentCollector, StridesAreTheCallers) {
  Activations a(layer_shape(0, 2, 2, 8), 40, 4);
  a.fill_normal(4);
  Activations by_head = a;  // the same rows, head-major
  for (std::int64_t t = 0; t < 40; ++t) {
    for (int h = 0; h < 2; ++h) {
      std::copy_n(a.q_row(t, h), 8, by_head.q.data() + (h * 40 + t) * 8);
      std::copy_n(a.k_row(t, h), 8, by_head.k.data() + (h * 40 + t) * 8);
      std::copy_n(a.v_row(t, h), 8, by_head.v.data() + (h * 40 + t) * 8);
      std::copy_n(a.o_row(t, h), 8, by_head.o.data() + (h * 40 + t) * 8);
    }
  }
  MomentCollector::Block block = by_head.block(0, 40);
  block.q_token = block.k_token = block.v_token = block.o_token = 8;
  block.q_head = block.k_head = block.v_head = block.o_head = 320;
  MomentCollector collector(a.shape, {});
  EXPECT_EQ(collector.check(block), "");
  collector.add(block, 0, 2);
  collector.finish();
  expect_identical(collector.heads(), collect(a, 40).heads());
}

TEST(MomentCollector, B5WarmUpAndPaddingAreNotCounted) {
  Activations a(layer_shape(0, 2, 1, 8), 100, 0);
  a.fill_normal(5);
  Activations padded = a;
  for (std::size_t t = 40; t < 50; ++t) padded.positions[t] = -1;
  CollectorConfig config;
  config.warmup_tokens = 10;
  EXPECT_EQ(collect(a, 100, config).heads()[0].tokens, 90);
  const MomentCollector collector = collect(padded, 100, config);
  EXPECT_EQ(collector.heads()[0].tokens, 80);
  EXPECT_EQ(collector.heads()[0].queries, 160);
  std::vector<const float*> counted;
  for (std::int64_t t = 10; t < 100; ++t) {
    if (t < 40 || t >= 50) counted.push_back(a.k_row(t, 0));
  }
  EXPECT_LT(relative_difference(collector.heads()[0].k_moment, direct_moment(counted, 8)), 1e-13);
}

TEST(MomentCollector, B1BadRowsAreNamedAndEarlierSumsStay) {
  Activations a(layer_shape(3, 4, 2, 16), 128);
  a.fill_normal(6);
  Activations bad = a;
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    bad = a;
    bad.k_row(70, 1)[15] = value;
    MomentCollector collector(a.shape, {});
    EXPECT_EQ(collector.check(bad.block(0, 64)), "");
    collector.add(bad.block(0, 64), 0, 2);
    const std::string complaint = collector.check(bad.block(64, 64));
    EXPECT_NE(complaint.find("layer 3"), std::string::npos) << complaint;
    EXPECT_NE(complaint.find("key of token 6 (position 70), head 1"), std::string::npos) << complaint;
    collector.finish();
    Activations half(a.shape, 64);
    half.q.assign(a.q.begin(), a.q.begin() + static_cast<std::ptrdiff_t>(half.q.size()));
    half.k.assign(a.k.begin(), a.k.begin() + static_cast<std::ptrdiff_t>(half.k.size()));
    half.v.assign(a.v.begin(), a.v.begin() + static_cast<std::ptrdiff_t>(half.v.size()));
    half.o.assign(a.o.begin(), a.o.begin() + static_cast<std::ptrdiff_t>(half.o.size()));
    expect_identical(collector.heads(), collect(half, 64).heads());
  }
  bad = a;
  bad.q_row(0, 3)[0] = std::nanf("");
  EXPECT_NE(MomentCollector(a.shape, {}).check(bad.block(0, 1)).find("query of token 0 (position 0), head 3, contains NaN"),
            std::string::npos);
  bad = a;
  bad.v_row(1, 0)[7] = 1e5F;  // finite, but no 16-bit cache could hold it
  EXPECT_NE(MomentCollector(a.shape, {}).check(bad.block(0, 2)).find("beyond binary16"), std::string::npos);
  bad.v_row(1, 0)[7] = 65504.0F;
  EXPECT_EQ(MomentCollector(a.shape, {}).check(bad.block(0, 2)), "");
  MomentCollector::Block incomplete = a.block(0, 2);
  incomplete.o = nullptr;
  EXPECT_NE(MomentCollector(a.shape, {}).check(incomplete).find("attention output"), std::string::npos);
}

TEST(MomentCollector, PreRopeMeanIsTheMeanBeforeRope) {
  for (const RopePairing pairing : {RopePairing::none, RopePairing::norm, RopePairing::neox}) {
    LayerShape shape = layer_shape(0, 2, 1, 16, pairing);
    if (pairing != RopePairing::none) shape.rope.n_rot = 12;  // partial
    shape.rope.attn_factor = 1.25F;
    Activations a(shape, 500, 4);
    a.fill_normal(7);
    const Rope rope(shape.rope, 16);
    VectorD expected = VectorD::Zero(16);
    for (std::int64_t t = 0; t < 500; ++t) {
      float* row = a.k_row(t, 0);
      for (int i = 0; i < 16; ++i) row[i] += static_cast<float>(i);
      for (int i = 0; i < 16; ++i) expected[i] += static_cast<double>(row[i]);
      rope.apply({row, 16}, a.positions[static_cast<std::size_t>(t)]);
    }
    const MomentCollector collector = collect(a, 500);
    EXPECT_LT((collector.heads()[0].k_pre_sum - expected).cwiseAbs().maxCoeff(), 1e-6 * expected.norm());
    if (pairing != RopePairing::none) {
      EXPECT_GT((collector.heads()[0].k_sum - expected).norm(), 0.1 * expected.norm());
    }
  }
}

TEST(MomentCollector, SstWeightsMatchTwoPasses) {
  Activations a(layer_shape(0, 4, 2, 16), 600, 4);
  a.fill_normal(8);
  a.round_to_half();  // so that the pilot's storage is exact
  CollectorConfig config;
  config.pilot_tokens = 128;
  const MomentCollector collector = collect(a, 600, config);
  for (int h = 0; h < 2; ++h) {
    std::vector<const float*> pilot;
    for (std::int64_t t = 0; t < 128; ++t) {
      for (int i = 0; i < 2; ++i) pilot.push_back(a.q_row(t, 2 * h + i));
    }
    const MatrixD metric = direct_moment(pilot, 16) / 256.0;
    MatrixD expected = MatrixD::Zero(16, 16);
    double total = 0;
    for (std::int64_t t = 0; t < 600; ++t) {
      const VectorD k = Eigen::Map<const VectorF>(a.k_row(t, h), 16).cast<double>();
      const VectorD v = Eigen::Map<const VectorF>(a.v_row(t, h), 16).cast<double>();
      const double weight = k * metric * k.transpose();
      total += weight;
      expected += weight * v.transpose() * v;
    }
    const HeadMoments& head = collector.heads()[static_cast<std::size_t>(h)];
    EXPECT_NEAR(head.sst_weight / total, 1.0, 1e-12);
    EXPECT_LT(relative_difference(head.sst_moment, expected), 1e-12);
  }
}

TEST(MomentCollector, ShortTextsFlushTheirPilot) {
  Activations a(layer_shape(0, 2, 1, 8), 30, 4);
  a.fill_normal(9);
  MomentCollector collector = collect(a, 30);
  const HeadMoments once = collector.heads()[0];
  EXPECT_GT(once.sst_weight, 0.0);
  collector.finish();  // idempotent
  expect_identical(std::span(&once, 1), collector.heads());
}

// The paper's V moment: sum over queries of o^T o with o = S V equals V^T S^T S V.
TEST(MomentCollector, OutputMomentIsTheSoftmaxWeightedValueMoment) {
  const int n = 40;
  const int dim = 8;
  Activations a(layer_shape(0, 1, 1, dim), n, 4);
  a.fill_normal(10);
  MatrixD s = MatrixD::Zero(n, n);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j <= i; ++j) {
      double logit = 0;
      for (int d = 0; d < dim; ++d) logit += static_cast<double>(a.q_row(i, 0)[d]) * static_cast<double>(a.k_row(j, 0)[d]);
      s(i, j) = std::exp(logit / std::sqrt(8.0));
    }
    s.row(i) /= s.row(i).sum();
  }
  const MatrixD v = Eigen::Map<const MatrixF>(a.v.data(), n, dim).cast<double>();
  const MatrixD o = s * v;
  for (int i = 0; i < n; ++i) {
    for (int d = 0; d < dim; ++d) a.o_row(i, 0)[d] = static_cast<float>(o(i, d));
  }
  EXPECT_LT(relative_difference(collect(a, n).heads()[0].o_moment, v.transpose() * s.transpose() * s * v), 1e-6);
}

TEST(MomentCollector, SamplesStayUniformAndBounded) {
  Activations a(layer_shape(0, 1, 1, 8), 1000, 4);
  a.fill_normal(11);
  CollectorConfig config;
  config.max_samples = 100;
  const MomentCollector collector = collect(a, 77, config);
  const HeadMoments& head = collector.heads()[0];
  ASSERT_EQ(head.sample_positions.size(), 63U);  // stride 16
  for (std::size_t i = 0; i < 63; ++i) {
    EXPECT_EQ(head.sample_positions[i], 4 + 16 * static_cast<int>(i));
    const auto row = static_cast<Eigen::Index>(i);
    EXPECT_EQ(head.k_samples(row, 3), half_to_float(float_to_half(a.k_row(16 * row, 0)[3])));
    EXPECT_EQ(head.v_samples(row, 7), half_to_float(float_to_half(a.v_row(16 * row, 0)[7])));
  }
  config.max_samples = 1;
  EXPECT_EQ(collect(a, 1000, config).heads()[0].sample_positions, std::vector<std::int32_t>{4});
}

TEST(MomentCollector, RefusesImpossibleShapes) {
  EXPECT_THROW(MomentCollector(layer_shape(0, 3, 2, 8), {}), Error);
  EXPECT_THROW(MomentCollector(layer_shape(0, 2, 0, 8), {}), Error);
  CollectorConfig config;
  config.pilot_tokens = 0;
  EXPECT_THROW(MomentCollector(layer_shape(0, 2, 2, 8), config), Error);
  Activations a(layer_shape(0, 2, 2, 8), 4);
  MomentCollector collector(a.shape, {});
  EXPECT_THROW(collector.add(a.block(0, 4), 0, 3), Error);
}

}  // namespace
}  // namespace oscar

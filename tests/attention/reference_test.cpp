// The oracle itself, against attention written out by hand over rows that the test knows.
#include <gtest/gtest.h>

#include "world.h"

namespace oscar {
namespace {

using test::Queries;
using test::Shape;
using test::World;

// Plain attention over given f32 rows [n][n_head_kv * dim], visible = the first `seen` rows.
std::vector<double> plain_attention(const Queries& queries, const Shape& shape, int token, int head, std::size_t seen,
                                    const std::vector<std::vector<float>>& k, const std::vector<std::vector<float>>& v) {
  const float* q = queries.args.q + token * queries.args.q_token_stride + head * queries.args.q_head_stride;
  const int kv_head = head / shape.group;
  std::vector<double> o(static_cast<std::size_t>(shape.v_dim), 0.0);
  double total = 0.0;
  for (std::size_t j = 0; j < seen; ++j) {
    double dot = 0.0;
    for (int d = 0; d < shape.k_dim; ++d)
      dot += static_cast<double>(q[d]) * static_cast<double>(k[j][static_cast<std::size_t>(kv_head * shape.k_dim + d)]);
    const double p = std::exp(static_cast<double>(queries.args.scale) * dot);
    total += p;
    for (int d = 0; d < shape.v_dim; ++d)
      o[static_cast<std::size_t>(d)] += p * static_cast<double>(v[j][static_cast<std::size_t>(kv_head * shape.v_dim + d)]);
  }
  for (double& x : o) x /= total;
  return o;
}

TEST(AttentionReference, EqualsPlainAttentionWhenEverythingIsInTheWindow) {
  Shape shape;
  shape.k_dim = 80;
  shape.v_dim = 64;
  shape.windows = {4, 1000, 0};
  World world(shape, 60);
  std::vector<std::vector<float>> k, v;
  for (std::int32_t p = 0; p < 50; ++p) {
    const std::vector<std::int64_t> cell = {p + 3};
    const std::vector<std::int32_t> position = {p};
    const std::vector<SeqId> seq = {0};
    world.cache().place(cell, position, seq);
    k.push_back(world.key_row(p));
    v.push_back(world.value_row());
    world.cache().write_k(1, cell[0], k.back());
    world.cache().write_v(1, cell[0], v.back());
    // What a 16-bit cache would hold: the row rounded to binary16.
    for (std::vector<float>* row : {&k.back(), &v.back()}) {
      for (float& x : *row) x = half_to_float(float_to_half(x));
    }
  }
  Queries queries(world, {0, 17, 49}, 3, 50, 1);
  const std::vector<float> got = queries.reference();
  const std::vector<std::size_t> seen = {1, 18, 50};
  std::size_t at = 0;
  double squared = 0.0;
  for (int t = 0; t < 3; ++t) {
    for (int h = 0; h < 6; ++h) {
      for (const double want : plain_attention(queries, shape, t, h, seen[static_cast<std::size_t>(t)], k, v)) {
        // Stored exact rows may differ from the rounded row in the lowest mantissa bit (state_row.h): up to 2^-10 relative.
        EXPECT_NEAR(static_cast<double>(got[at]), want, 1e-2);
        squared += std::pow(static_cast<double>(got[at++]) - want, 2);
      }
    }
  }
  EXPECT_LT(std::sqrt(squared / static_cast<double>(at)), 2e-3);
}

TEST(AttentionReference, OneVisibleRowIsReturnedFromTheTierOfItsPosition) {
  Shape shape;
  shape.windows = {2, 5, 3};
  World world(shape, 40);
  world.append(0, 0, 30, 1);
  for (const std::int64_t cell : {0, 1, 2, 10, 24, 25, 29}) {
    Queries queries(world, {29}, 0, 30);
    queries.hide_all();
    queries.show(0, cell);
    const std::vector<float> got = queries.reference();
    const bool exact = cell < 2 || 29 - cell < 5;
    std::vector<float> row(static_cast<std::size_t>(shape.n_head_kv * shape.v_dim));
    world.cache().read_row(0, false, cell, exact, row);
    for (int h = 0; h < 6; ++h) {
      for (int d = 0; d < shape.v_dim; ++d) {
        EXPECT_FLOAT_EQ(got[static_cast<std::size_t>(h * shape.v_dim + d)],
                        row[static_cast<std::size_t>(h / shape.group * shape.v_dim + d)])
            << "cell " << cell;
      }
    }
  }
}

TEST(AttentionReference, ASinkTakesItsShareOfTheProbability) {
  Shape shape;
  World world(shape, 20);
  world.append(0, 0, 1, 1);
  Queries queries(world, {0}, 0, 1);
  const std::vector<float> without = queries.reference();
  queries.set_sinks(std::vector<float>(6, 0.0F));
  const std::vector<float> with = queries.reference();
  for (int h = 0; h < 6; ++h) {
    std::vector<float> k(static_cast<std::size_t>(shape.n_head_kv * shape.k_dim));
    world.cache().read_row(0, true, 0, true, k);
    double dot = 0.0;
    for (int d = 0; d < shape.k_dim; ++d) {
      dot += static_cast<double>(queries.args.q[h * queries.args.q_head_stride + d]) *
             static_cast<double>(k[static_cast<std::size_t>(h / 3 * shape.k_dim + d)]);
    }
    const double share = 1.0 / (1.0 + std::exp(-static_cast<double>(queries.args.scale) * dot));
    const auto at = static_cast<std::size_t>(h * shape.v_dim);
    EXPECT_NEAR(static_cast<double>(with[at]), share * static_cast<double>(without[at]), 1e-5);
  }
}

}  // namespace
}  // namespace oscar

// A synthetic layer whose outputs are what attention makes of its queries, keys and values, laid out as a host's cache is: rows
// in binary16 at scattered cells. For tests of the importance statistics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "method/synthetic_layer.h"
#include "oscar/attention/importance_collector.h"
#include "oscar/base/half.h"

namespace oscar::test {

struct AttendedLayer {
  LayerShape shape;
  std::int64_t n = 0;
  float scale = 0.25F, softcap = 0.0F;
  std::vector<float> sinks;                          // [n_head] or empty
  std::shared_ptr<const std::vector<float>> metric;  // [n_head, v_dim, v_dim] or null
  std::vector<float> q, o;                           // [n, n_head, dim], tokens and heads with gaps between them
  std::vector<std::uint16_t> k, v;                   // [2 n cells, n_head_kv, dim]
  std::vector<std::int64_t> cells;                   // [n]
  std::int64_t q_head = 0, q_token = 0, o_head = 0, o_token = 0;

  AttendedLayer(LayerShape layer, std::int64_t tokens, unsigned seed) : shape(std::move(layer)), n(tokens) {
    q_head = shape.k_dim + 3;
    q_token = q_head * shape.n_head + 1;
    o_head = shape.v_dim + 1;
    o_token = o_head * shape.n_head + 5;
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto size = [](std::int64_t values) { return static_cast<std::size_t>(values); };
    q.resize(size(n * q_token));
    o.assign(size(n * o_token), 0.0F);
    k.resize(size(2 * n * shape.n_head_kv * shape.k_dim));
    v.resize(size(2 * n * shape.n_head_kv * shape.v_dim));
    for (std::int64_t i = 0; i < n; ++i) cells.push_back(2 * n - 1 - 2 * i);  // every second cell, backwards
    for (float& x : q) x = 1.5F * normal(rng);
    const Rope rope(shape.rope, shape.k_dim);
    std::vector<float> row(size(shape.k_dim));
    for (std::int64_t i = 0; i < n; ++i) {
      for (int h = 0; h < shape.n_head_kv; ++h) {
        for (int d = 0; d < shape.k_dim; ++d)
          row[size(d)] = (d % 3 == 0 ? 2.0F : 0.0F) + normal(rng) / (1.0F + 0.2F * static_cast<float>(d));
        rope.apply(row, i);
        for (int d = 0; d < shape.k_dim; ++d) k[key_at(i, h) + size(d)] = float_to_half(row[size(d)]);
        for (int d = 0; d < shape.v_dim; ++d)
          v[value_at(i, h) + size(d)] = float_to_half(0.5F + normal(rng) / (1.0F + 0.3F * static_cast<float>(d)));
      }
    }
  }

  // Fills `o`; call it once scale, softcap and sinks are set.
  void attend() {
    for (std::int64_t i = 0; i < n; ++i) {
      for (int h = 0; h < shape.n_head; ++h) {
        const std::vector<double> p = probabilities(i, h);
        for (int d = 0; d < shape.v_dim; ++d) {
          double sum = 0;
          for (std::int64_t j = 0; j <= i; ++j) sum += p[static_cast<std::size_t>(j)] * value(j, h / group(), d);
          o[static_cast<std::size_t>(i * o_token + h * o_head + d)] = static_cast<float>(sum);
        }
      }
    }
  }
  // W_o^T W_o of random projections into a space of 1.5 v_dim.
  void draw_metric(unsigned seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values;
    for (int h = 0; h < shape.n_head; ++h) {
      MatrixF w(shape.v_dim * 3 / 2, shape.v_dim);
      for (Eigen::Index i = 0; i < w.size(); ++i) w.data()[i] = normal(rng) * (i % shape.v_dim == h ? 3.0F : 0.5F);
      const MatrixF m = w.transpose() * w;
      values.insert(values.end(), m.data(), m.data() + m.size());
    }
    metric = std::make_shared<const std::vector<float>>(std::move(values));
  }

  [[nodiscard]] int group() const { return shape.n_head / shape.n_head_kv; }
  [[nodiscard]] double query(std::int64_t i, int head, int d) const {
    return static_cast<double>(q[static_cast<std::size_t>(i * q_token + head * q_head + d)]);
  }
  [[nodiscard]] double output(std::int64_t i, int head, int d) const {
    return static_cast<double>(o[static_cast<std::size_t>(i * o_token + head * o_head + d)]);
  }
  [[nodiscard]] double key(std::int64_t j, int kv_head, int d) const {
    return static_cast<double>(half_to_float(k[key_at(j, kv_head) + static_cast<std::size_t>(d)]));
  }
  [[nodiscard]] double value(std::int64_t j, int kv_head, int d) const {
    return static_cast<double>(half_to_float(v[value_at(j, kv_head) + static_cast<std::size_t>(d)]));
  }
  [[nodiscard]] std::vector<double> probabilities(std::int64_t i, int head) const {
    std::vector<double> p;
    double sum = sinks.empty() ? 0.0 : std::exp(static_cast<double>(sinks[static_cast<std::size_t>(head)]));
    for (std::int64_t j = 0; j <= i; ++j) {
      double logit = 0;
      for (int d = 0; d < shape.k_dim; ++d) logit += query(i, head, d) * key(j, head / group(), d);
      logit *= static_cast<double>(scale);
      if (softcap != 0.0F) logit = static_cast<double>(softcap) * std::tanh(logit / static_cast<double>(softcap));
      p.push_back(std::exp(logit));
      sum += p.back();
    }
    for (double& x : p) x /= sum;
    return p;
  }

  // Tokens first .. first + count - 1.
  [[nodiscard]] ImportanceCollector::Block block(std::int64_t first, std::int64_t count) const {
    ImportanceCollector::Block b;
    b.first = first;
    b.n = count;
    b.q = q.data() + first * q_token;
    b.o = o.data() + first * o_token;
    b.q_token = q_token;
    b.q_head = q_head;
    b.o_token = o_token;
    b.o_head = o_head;
    b.k = k.data();
    b.v = v.data();
    b.cells = cells.data();
    b.scale = scale;
    b.softcap = softcap;
    b.sinks = sinks.empty() ? nullptr : sinks.data();
    return b;
  }
  void feed(ImportanceCollector& collector, std::int64_t chunk) const {
    for (std::int64_t first = 0; first < n; first += chunk)
      collector.add(block(first, std::min(chunk, n - first)), 0, shape.n_head);
    collector.end_sequence();
  }

 private:
  [[nodiscard]] std::size_t key_at(std::int64_t position, int head) const {
    return static_cast<std::size_t>((cells[static_cast<std::size_t>(position)] * shape.n_head_kv + head) * shape.k_dim);
  }
  [[nodiscard]] std::size_t value_at(std::int64_t position, int head) const {
    return static_cast<std::size_t>((cells[static_cast<std::size_t>(position)] * shape.n_head_kv + head) * shape.v_dim);
  }
};

}  // namespace oscar::test

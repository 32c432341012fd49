// The oracle: attention in double precision, written as the definition reads. Slow on purpose, simple for ever.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "oscar/attention/attention.h"
#include "oscar/base/half.h"

namespace oscar {
namespace {

// read_row() decodes whole rows of all heads, so each (K or V, cell, tier) is read once, when it is first wanted.
class Rows {
 public:
  explicit Rows(const AttentionArgs& args) : args_(args) {}

  const std::vector<float>& get(bool is_k, std::int64_t cell, bool exact) {
    auto [it, added] = rows_.try_emplace({is_k, cell, exact});
    if (added) {
      const LayerSpec& spec = args_.cache->layers()[static_cast<std::size_t>(args_.layer_index)];
      it->second.resize(static_cast<std::size_t>(spec.n_head_kv) * static_cast<std::size_t>(is_k ? spec.k_dim : spec.v_dim));
      args_.cache->read_row(args_.layer_index, is_k, cell, exact, it->second);
    }
    return it->second;
  }

 private:
  const AttentionArgs& args_;
  std::map<std::tuple<bool, std::int64_t, bool>, std::vector<float>> rows_;
};

struct Visible {
  std::int64_t cell;
  bool exact;   // tier
  double bias;  // mask value
};

// What token t sees, and in which tier.
std::vector<Visible> visible_cells(const AttentionArgs& args, std::int64_t t) {
  const KvCache& cache = *args.cache;
  std::vector<Visible> cells;
  for (std::int64_t j = 0; j < args.n_kv; ++j) {
    const std::int64_t cell = args.first_cell + j;
    const std::int32_t position = cache.position(cell);
    double bias = 0.0;
    if (args.mask != nullptr) {
      bias = static_cast<double>(half_to_float(args.mask[t * args.mask_token_stride + j]));
      if (bias == -std::numeric_limits<double>::infinity()) continue;
    } else if (position < 0 || position > args.positions[t]) {
      continue;
    }
    const bool has_exact = cache.has_exact(cell);
    const bool has_code = cache.has_code(cell) && position >= 0;
    if (!has_exact && !has_code) continue;
    const bool wants_exact = cache.windows().exact(position, args.positions[t]);
    cells.push_back({cell, has_exact && (wants_exact || !has_code), bias});
  }
  return cells;
}

}  // namespace

void attention_reference(const AttentionArgs& args) {
  const LayerSpec& spec = args.cache->layers()[static_cast<std::size_t>(args.layer_index)];
  const int group = args.n_head / spec.n_head_kv;
  Rows rows(args);
  for (std::int64_t t = 0; t < args.n_tokens; ++t) {
    const std::vector<Visible> cells = visible_cells(args, t);
    for (int h = 0; h < args.n_head; ++h) {
      const int kv_head = h / group;
      const float* q = args.q + t * args.q_token_stride + h * args.q_head_stride;
      const double slope = (args.slopes != nullptr) ? static_cast<double>(args.slopes[h]) : 1.0;

      std::vector<double> logits;
      double max = (args.sinks != nullptr) ? static_cast<double>(args.sinks[h]) : -std::numeric_limits<double>::infinity();
      for (const Visible& v : cells) {
        const float* k = rows.get(true, v.cell, v.exact).data() + static_cast<std::ptrdiff_t>(kv_head) * spec.k_dim;
        double dot = 0.0;
        for (int d = 0; d < spec.k_dim; ++d) dot += static_cast<double>(q[d]) * static_cast<double>(k[d]);
        double x = static_cast<double>(args.scale) * dot;
        const auto cap = static_cast<double>(args.softcap);
        if (cap != 0.0) x = cap * std::tanh(x / cap);
        logits.push_back(x + slope * v.bias);
        max = std::max(max, logits.back());
      }

      double denominator = (args.sinks != nullptr) ? std::exp(static_cast<double>(args.sinks[h]) - max) : 0.0;
      std::vector<double> o(static_cast<std::size_t>(spec.v_dim), 0.0);
      for (std::size_t i = 0; i < cells.size(); ++i) {
        const double p = std::exp(logits[i] - max);
        const float* v =
            rows.get(false, cells[i].cell, cells[i].exact).data() + static_cast<std::ptrdiff_t>(kv_head) * spec.v_dim;
        denominator += p;
        for (std::size_t d = 0; d < o.size(); ++d) o[d] += p * static_cast<double>(v[d]);
      }
      float* out = args.out + t * args.out_token_stride + h * args.out_head_stride;
      for (std::size_t d = 0; d < o.size(); ++d) out[d] = cells.empty() ? 0.0F : static_cast<float>(o[d] / denominator);
    }
  }
}

}  // namespace oscar

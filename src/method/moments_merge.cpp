#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"
#include "oscar/method/importance.h"

namespace oscar {
namespace {

// `keep` of the head's samples, evenly spaced, appended to `out` behind row `at`.
void append_thinned(const HeadMoments& head, std::int64_t keep, HeadMoments& out) {
  const auto have = static_cast<std::int64_t>(head.sample_positions.size());
  for (std::int64_t i = 0; i < keep; ++i) {
    const std::int64_t from = i * have / keep;
    const auto at = static_cast<Eigen::Index>(out.sample_positions.size());
    out.k_samples.row(at) = head.k_samples.row(from);
    out.v_samples.row(at) = head.v_samples.row(from);
    out.sample_positions.push_back(head.sample_positions[static_cast<std::size_t>(from)]);
  }
}

// Every sample must stand for the same number of tokens, and the larger of the two sample counts is the limit.
void merge_samples(HeadMoments& a, const HeadMoments& b) {
  const auto have_a = static_cast<double>(a.sample_positions.size());
  const auto have_b = static_cast<double>(b.sample_positions.size());
  const auto tokens_a = static_cast<double>(a.tokens);
  const auto tokens_b = static_cast<double>(b.tokens);
  if (b.sample_positions.empty()) return;
  double density = std::max(have_a, have_b) / (tokens_a + tokens_b);
  if (tokens_a > 0) density = std::min(density, have_a / tokens_a);
  density = std::min(density, have_b / tokens_b);
  const auto keep_a = static_cast<std::int64_t>(std::min(have_a, std::round(density * tokens_a)));
  const auto keep_b = static_cast<std::int64_t>(std::min(have_b, std::round(density * tokens_b)));
  HeadMoments merged;
  merged.k_samples.resize(keep_a + keep_b, b.k_samples.cols());
  merged.v_samples.resize(keep_a + keep_b, b.v_samples.cols());
  append_thinned(a, keep_a, merged);
  append_thinned(b, keep_b, merged);
  a.k_samples.swap(merged.k_samples);
  a.v_samples.swap(merged.v_samples);
  a.sample_positions.swap(merged.sample_positions);
}

void merge_head(HeadMoments& a, const HeadMoments& b) {
  merge_samples(a, b);
  a.q_moment += b.q_moment;
  a.k_moment += b.k_moment;
  a.v_moment += b.v_moment;
  a.o_moment += b.o_moment;
  a.sst_moment += b.sst_moment;
  a.k_sum += b.k_sum;
  a.k_pre_sum += b.k_pre_sum;
  a.v_sum += b.v_sum;
  a.sst_weight += b.sst_weight;
  a.tokens += b.tokens;
  a.queries += b.queries;
  if (!a.importance.empty() && !b.importance.empty()) {
    merge(a.importance, b.importance);
  } else {
    a.importance = {};  // half a calibration would pass for a whole one
  }
}

void require_mergeable(const ModelMoments& a, const ModelMoments& b) {
  if (a.model_fingerprint != b.model_fingerprint) {
    fail("cannot merge moments of different models: '{}' ({}) and '{}' ({})", a.model_name, a.model_fingerprint, b.model_name,
         b.model_fingerprint);
  }
  if (a.n_layer != b.n_layer || a.shapes.size() != b.shapes.size()) {
    fail("cannot merge moments of {} and {} layers ({} and {} of them with attention)", a.n_layer, b.n_layer, a.shapes.size(),
         b.shapes.size());
  }
  for (std::size_t i = 0; i < a.shapes.size(); ++i) {
    if (a.shapes[i] != b.shapes[i]) fail("cannot merge moments: layer {} has a different geometry or RoPE", a.shapes[i].layer);
    if (a.layers[i].size() != b.layers[i].size()) fail("cannot merge moments: layer {} is missing in one", a.shapes[i].layer);
  }
}

}  // namespace

void merge(ModelMoments& a, const ModelMoments& b) {
  require_mergeable(a, b);
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    for (std::size_t h = 0; h < a.layers[i].size(); ++h) merge_head(a.layers[i][h], b.layers[i][h]);
  }
  a.sources.insert(a.sources.end(), b.sources.begin(), b.sources.end());
  a.date = std::max(a.date, b.date);  // ISO 8601 sorts by time
}

}  // namespace oscar

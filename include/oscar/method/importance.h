// What coding errors of a layer's keys cost at its output: the statistics behind the `spectral` codec, from forward passes
// only.
//
// A pair is (query i, key j) with j >= sink and j <= i - recent: the only keys that are ever read as codes. Its weight
//   w_ij = p_ij^2 |W_o (v_j - o_i)|^2          p = softmax, o_i = sum_j p_ij v_j, W_o the head's slice of the output projection
// is how strongly the layer's output answers an error of logit ij, squared. Per KV head, D = k_dim, summed over its query
// heads:
//   metric = sum_i w_i. q_i^T q_i  (q with the softmax scale)     the metric in which key errors are measured
//   joint  = sum_j t_j a_j^T a_j,  a_j = [ k_j (D), m cos(p theta) (n_rot / 2), m sin(p theta) (n_rot / 2), 1 ]
// with token weights t_j = 1/2 w_.j / mean(w_.) + 1/2 (mean over one sequence), p the position and m RoPE's magnitude. The
// covariance of keys with ANY pre-RoPE mean mu0 removed is a congruence of `joint` (see covariance()), so moments merge by
// addition before anybody has chosen a mean. With E the covariance of key errors, tr(metric E) is the squared error they cause
// at the layer's output, all queries together, to be compared with output_energy.
//
// Position mix: statistics of positions up to a few thousand break at 32K. Half of the weight therefore goes to copies of the
// rows that RoPE has turned on by a pseudo-random offset in 0 .. kMixOffsets * kMixOffsetStep, a function of the position
// alone. Layers without RoPE need none. Collected by ImportanceCollector (attention/importance_collector.h).
#pragma once

#include <cstdint>

#include "oscar/base/matrix.h"
#include "oscar/method/moments.h"

namespace oscar {

// Weighted mean [D] and covariance [D, D] about it of k - RoPE(pre_rope_mean), positions mixed.
struct KeyCovariance {
  VectorD mean;
  MatrixD covariance;
};
KeyCovariance covariance(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean);

// The position mix: a token's turned copies, copy 0 or 1.
inline constexpr std::int32_t kMixOffsets = 256;
inline constexpr std::int32_t kMixOffsetStep = 96;
int position_mix_index(std::int64_t position, int copy);            // 0 .. kMixOffsets - 1
std::int32_t position_mix_offset(std::int64_t position, int copy);  // index * kMixOffsetStep

// Keeps `keep` of the samples, evenly spaced.
void thin_samples(HeadImportance& head, std::int64_t keep);
// Adds b to a; both of the same layer. Samples are thinned so that each stands for as many tokens.
void merge(HeadImportance& a, const HeadImportance& b);

}  // namespace oscar

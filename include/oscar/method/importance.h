// What coding errors of a layer's keys cost at its output: the statistics behind the `spectral` codec, from forward passes
// only.
//
// A pair is (query i, key j) with j >= sink and j <= i - recent: the only keys that are ever read as codes. Its weight
//   w_ij = p_ij^2 |W_o (v_j - o_i)|^2          p = softmax, o_i = sum_j p_ij v_j, W_o the head's slice of the output projection
// is how strongly the layer's output answers an error of logit ij, squared. Per KV head, D = k_dim, summed over its query
// heads:
//   metric = sum_i w_i. q_i^T q_i                     the metric in which key errors are measured
//   joint  = sum_j t_j a_j^T a_j,  a_j = [ k_j (D), m cos(p theta) (n_rot / 2), m sin(p theta) (n_rot / 2), 1 ]
// with token weights t_j = 1/2 w_.j / mean(w_.) + 1/2 (mean over one sequence), p the position and m RoPE's magnitude. The
// covariance of keys with ANY pre-RoPE mean mu0 removed is a congruence of `joint` (see covariance()), so moments merge by
// addition before anybody has chosen a mean.
//
// Position mix: statistics of positions up to a few thousand break at 32K. Half of the weight therefore goes to copies of the
// rows that RoPE has turned on by a pseudo-random offset in 0 .. kOffsets * kOffsetStep, a function of the position alone.
// Layers without RoPE need none.
//
// Cost: about 3 D multiply-adds and 2 exponentials per query head and pair, and (2 + 16) D^2 per token and KV head.
// Memory: the sums, the keys of the running sequence at 2 bytes a value, and the samples; scratch is constant.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/method/moments.h"

namespace oscar {

struct ImportanceConfig {
  std::int32_t sink = 64, recent = 256;
  std::int64_t max_samples = 2048;  // key rows kept per head; stride doubles when full
};

// Weighted mean [D] and covariance [D, D] about it of k - RoPE(pre_rope_mean), positions mixed.
struct KeyCovariance {
  VectorD mean;
  MatrixD covariance;
};
KeyCovariance covariance(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean);

// The offset of a token's turned copy, copy 0 or 1.
std::int32_t position_mix_offset(std::int64_t position, int copy);

class ImportanceCollector {
 public:
  // output_metric: W_o^T W_o per query head, [n_head, v_dim, v_dim] row-major; empty: identity.
  ImportanceCollector(LayerShape shape, ImportanceConfig config, std::shared_ptr<const std::vector<float>> output_metric);
  ~ImportanceCollector();

  // Queries of consecutive tokens of one sequence, and the whole past of that sequence: token 0 .. first + n - 1.
  struct Block {
    std::int64_t first = 0, n = 0;           // positions first .. first + n - 1; the sequence has been given from position 0 on
    const float *q = nullptr, *o = nullptr;  // [n, n_head, dim] with strides in floats
    std::int64_t q_token = 0, q_head = 0, o_token = 0, o_head = 0;
    const std::uint16_t *k = nullptr, *v = nullptr;  // cache, binary16: row of cell c at k + c * n_head_kv * k_dim
    const std::int64_t* cells = nullptr;             // [first + n] cell of each position
    float scale = 1.0F, softcap = 0.0F;
    const float* sinks = nullptr;  // [n_head] or null
  };
  // Different head ranges may run on different threads; results do not depend on the split.
  void add(const Block& block, int head_begin, int head_end);
  // Counts the running sequence and forgets its rows. Not concurrent with add().
  void end_sequence();

  [[nodiscard]] const LayerShape& shape() const { return shape_; }
  [[nodiscard]] std::span<HeadImportance> heads() { return heads_; }  // valid after end_sequence()

 private:
  struct Sequence;
  LayerShape shape_;
  ImportanceConfig config_;
  Rope rope_;
  std::shared_ptr<const std::vector<float>> output_metric_;
  std::vector<HeadImportance> heads_;
  std::vector<std::unique_ptr<Sequence>> running_;  // one per head
  std::int64_t seen_ = 0, stride_ = 1;              // keys offered as samples, and every how many-th is kept
};

// Adds b to a; both of the same layer. Samples are thinned so that each stands for as many tokens.
void merge(HeadImportance& a, const HeadImportance& b);

}  // namespace oscar

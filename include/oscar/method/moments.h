// Second moments of one layer's Q, K, V and attention output O, accumulated from a stream of tokens in constant memory.
//
// Per KV head h of Hkv, D = k_dim, Dv = v_dim, g = n_head / Hkv query heads per KV head, all in fp64:
//   q_moment[h]    = sum over tokens and the g query heads of q^T q                (post-RoPE, softmax scale not applied)
//   k_moment[h], v_moment[h] = sum k^T k, v^T v
//   k_sum[h], k_pre_sum[h], v_sum[h]: sums of rows after / before RoPE, of values
//   o_moment[h]    = sum over tokens and query heads of o^T o = V^T S^T S V, S the softmax matrix: the paper's V moment
//   sst_moment[h]  = sum_t w_t v^T v, w_t = k_t C_h k_t^T: the shipped approximation. C_h must be known before the rows
//                    arrive, so rows of the first `pilot_tokens` tokens are held (as binary16) and C_h is frozen from them.
// Sums are kept un-normalised with their counts, so collectors merge by addition.
// Accumulation runs in blocks of fixed token boundaries (kMomentBlock), so results do not depend on how calls cut the
// stream, nor on the number of threads (each head is one thread's): results are bit-identical.
// Memory: the sums, one open block (kMomentBlock * (n_head + n_head_kv) rows), pilot_tokens rows of K and V at 2 bytes a value
// until C_h is frozen, and the samples. Cost: about (g + 2.5) (D^2 + Dv^2) / 2 multiply-adds per token and KV head.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/method/rope.h"

namespace oscar {

inline constexpr int kMomentBlock = 64;

struct LayerShape {
  int layer = 0;
  int n_head = 0, n_head_kv = 0, k_dim = 0, v_dim = 0;
  bool sliding_window = false;
  RopeParams rope;
  bool operator==(const LayerShape&) const = default;
};

// What coding errors of one KV head's keys cost, collected by ImportanceCollector; see importance.h.
struct HeadImportance {
  MatrixD metric;                              // [D, D], divided by nothing
  MatrixD joint;                               // [E, E], E = D + n_rot + 1
  double pair_weight = 0;                      // sum of w_ij
  double output_energy = 0;                    // sum_i |W_o o_i|^2 of the queries behind `metric`
  std::int64_t tokens = 0;                     // keys behind `joint`
  std::vector<std::uint16_t> sample_keys;      // [n, D] binary16, post-RoPE
  std::vector<float> sample_weights;           // [n] t_j
  std::vector<std::int32_t> sample_positions;  // [n], the same for all heads of a layer
  [[nodiscard]] bool empty() const { return joint.size() == 0; }
};

// What calibration keeps of one KV head; plain data, see above. Samples are rows for fitting clip thresholds.
struct HeadMoments {
  MatrixD q_moment, k_moment, v_moment, o_moment, sst_moment;  // [D, D] or [Dv, Dv]
  VectorD k_sum, k_pre_sum, v_sum;
  double sst_weight = 0;         // sum of w_t
  std::int64_t tokens = 0;       // rows of K and V
  std::int64_t queries = 0;      // rows of Q (tokens * g)
  MatrixF k_samples, v_samples;  // [n, D]: evenly spaced tokens, post-RoPE K, rounded to binary16 as a cache row would be
  std::vector<std::int32_t> sample_positions;  // [n]
  HeadImportance importance;                   // empty: not collected, so no spectral codec can be fitted
};

struct CollectorConfig {
  std::int64_t pilot_tokens = 2048;
  std::int64_t warmup_tokens = 4;  // tokens at positions < warmup_tokens of each sequence are not counted (attention sinks);
                                   // nor are padding tokens, which a host marks by a negative position
  std::int64_t max_samples = 512;  // per head; stride doubles when full, so the sample stays uniform and deterministic
};

class MomentCollector {
 public:
  MomentCollector(LayerShape shape, CollectorConfig config);

  // One block of consecutive tokens of one sequence. Rows f32, token-major with the given strides (in floats):
  // q, o: [n, n_head, dim]; k (post-RoPE), v: [n, n_head_kv, dim]. positions: [n].
  // Heads [head_begin, head_end) only: call once per head range, from different threads if wanted; every range must see the
  // same blocks in the same order. A row with NaN/Inf makes the WHOLE block rejected for all heads: call check() first.
  struct Block {
    std::int64_t n = 0;
    const std::int32_t* positions = nullptr;
    const float *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;
    std::int64_t q_token = 0, q_head = 0, k_token = 0, k_head = 0, v_token = 0, v_head = 0, o_token = 0, o_head = 0;
  };
  // Empty string: sound. Else a sentence naming layer, token and tensor. K and V must also fit binary16: the rows to be coded
  // are those of a 16-bit cache.
  [[nodiscard]] std::string check(const Block& block) const;
  void add(const Block& block, int head_begin, int head_end);

  // Flushes the pilot (if fewer tokens arrived) and partial blocks; idempotent. Then heads() is valid.
  void finish();
  [[nodiscard]] const LayerShape& shape() const { return shape_; }
  [[nodiscard]] std::span<const HeadMoments> heads() const { return heads_; }
  // finish(), and the heads without a copy; nothing may be added afterwards.
  [[nodiscard]] std::vector<HeadMoments> take_heads();

 private:
  struct Pending;  // per head: rows not yet accumulated
  LayerShape shape_;
  CollectorConfig config_;
  std::vector<HeadMoments> heads_;
  std::vector<std::shared_ptr<Pending>> pending_;
};

// Where moments came from; merged files list all their sources.
struct TextSource {
  std::string name, sha256;
  std::int64_t tokens = 0;
};

// All layers of a model: what `oscar calibrate` checkpoints, `oscar merge` adds and the fit reads.
struct ModelMoments {
  std::string model_fingerprint, architecture, model_name;
  int n_layer = 0;
  std::vector<TextSource> sources;
  std::vector<LayerShape> shapes;                // full-attention AND sliding-window layers, ascending
  std::vector<std::vector<HeadMoments>> layers;  // parallel to shapes; empty for sliding-window layers
  std::string date, tool_version;
};
// Adds b to a; Error when they are of different models or shapes. Exact up to fp64 rounding of one addition per entry, but
// sst_moment stays weighted by each part's own pilot. Samples are thinned evenly so that each stands for as many tokens.
// A calibration that is resumed equals an uninterrupted one when both collect the same stretches of text and merge in order.
void merge(ModelMoments& a, const ModelMoments& b);
void save_moments(const ModelMoments& moments,
                  const std::string& path);  // safetensors, F64; written to a temporary, then renamed
ModelMoments load_moments(const std::string& path);

}  // namespace oscar

// Format 1, `int2`: the published OSCAR codec (rotate, clip, affine 2-bit per token and group), arXiv 2605.17757.
//
// Encode of one KV head's row x [D] at position p:
//   x' = x - mean(p)             mean: none | static [D] | RoPE_p(pre-RoPE mean)            (K; V: none | static)
//   y  = x' R                    R [D, D] orthogonal, per layer or per KV head
//   thr = sorted(|y|)[min(int(clip * D), D - 1)], y clamped to +-min(thr, 65504)             (clip 0: thr = inf)
//   per group of `group_size` coordinates: lo = f16(min y), step = f16((max y - min y) / 3)
//   code = clamp(floor((y - lo) / step + 0.5), 0, 3);  step == 0: all codes 0
// Decode: y^ = lo + step * code, x^ = y^ R^T + mean(p).
// lo and step are rounded to binary16 BEFORE codes are chosen, so codes fit the grid that the decoder sees.
//
// Bytes of a row (row_bytes = n_head_kv * (D / 4 + 4 * n_groups)), heads ascending, then groups ascending:
//   group_size / 4 bytes   codes; byte i holds coordinates 4i .. 4i+3 in bit pairs 0..3 (lowest bits first)
//   2 bytes                step, binary16 little-endian
//   2 bytes                lo,   binary16 little-endian
// The last group of a head may be shorter (D mod group_size); D and group_size are multiples of 4, group_size <= D <= 1024.
//
// Saturated coordinates (EncodeStats) are those clipped, by the ratio or by 65504, and those more than half a step outside
// lo .. lo + 3 step. Values beyond 2^96 are clamped before the rotation, NaN and Inf are replaced by 0: decoding is finite.
// The same bytes come out on every x86-64 processor (no fused multiply-add anywhere in the encoder).
#pragma once

#include <memory>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/codec.h"

namespace oscar {

struct Int2Config {
  int n_head_kv = 0;
  int head_dim = 0;
  int group_size = 0;             // 0: head_dim (one group per head, the published setting)
  std::vector<MatrixF> rotation;  // 1 (shared by the layer) or n_head_kv matrices [D, D]; empty: identity
  std::vector<float> clip;        // 1 or n_head_kv ratios, each 0 (off) or in (0, 1]; empty: off
  MatrixF mean_static;            // [n_head_kv, D] or empty
  MatrixF mean_pre_rope;          // [n_head_kv, D] or empty; needs rope; K only; excludes mean_static
  Rope rope;
};

// Throws Error on any inconsistent shape, a clip outside its range or NaN, a non-finite or non-orthogonal rotation
// (max |R^T R - I| > 1e-3), or a head_dim or group_size that is not such a multiple of 4.
std::unique_ptr<Codec> make_int2_codec(Int2Config config);

// Clip rule of the published code, shared by the encoder and by calibration: |y| value at the clip ratio of one head's row.
// Infinity for clip <= 0.
float int2_clip_threshold(std::span<const float> rotated_row, float clip);

}  // namespace oscar

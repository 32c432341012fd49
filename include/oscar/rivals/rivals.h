// Other KV-cache quantizers as SIMULATED codecs, so that they can be measured inside OSCAR's own cache and attention.
//
// The "code" of a row is the decoded row itself, as f32: only the accuracy is the rival's. bits_per_element() is what the
// method would store; row_bytes() is what the simulation stores. Nothing here makes a cache smaller.
//
// What is NOT the rival's, for all of them:
//   * OSCAR's windows (sink 64, recent 256) stand in for the method's own 16-bit part: KIVI's residual, RotateKV's 20 pivot
//     tokens, Kitty's 32 sink tokens, TurboQuant's skipped layers.
//   * Rows are rounded to binary16 before a codec sees them, as every row of OSCAR's cache.
//   * Nothing is calibrated: RotateKV's channel reordering is left out. fp8 has the fixed scale 1.
//
// Methods of one token at a time are pure functions of (row, position), as codec.h demands. Methods that quantise a channel
// over G consecutive tokens (G = 32 or 128; group = position / G) cannot be: until the G rows of a group have arrived, each is
// stored as it came; the row that completes the group rewrites the codes of all of them, in the memory that encode() was given.
// That is invisible to attention as long as `recent` >= G: a code is only read when its token is `recent` positions old. With a
// smaller window the tokens of an incomplete group are read exact, which is what these methods do themselves. So an object of
// such a method
//   * serves ONE cache, whose code memory must outlive the last encode(), and one sequence at a time: a second live row of the
//     same position is refused with an Error;
//   * keeps every row it saw, so that rows that are written again (a cleared cache, a regenerated answer) are quantised again
//     together with their neighbours.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "oscar/base/matrix.h"
#include "oscar/codec/codec.h"
#include "oscar/method/rope.h"

namespace oscar {

struct RivalInfo {
  std::string_view name, description, source;
  double (*bits)(bool is_k, int head_dim);  // per element, metadata included
};
std::span<const RivalInfo> rivals();

// Codec names: "sim:NAME", or "sim:NAME+mean", which removes the RoPE-rotated mean from K before the method sees it.
[[nodiscard]] bool is_rival(std::string_view codec);  // begins with "sim:"
// Throws Error listing the names when `codec` is none of them.
void check_rival(std::string_view codec);
std::string rival_names(std::string_view separator);

// One layer's K or V.
struct RivalLayer {
  int n_head_kv = 0, head_dim = 0;
  Rope rope;              // K's; pairing none: the layer has none
  MatrixF mean_pre_rope;  // [n_head_kv, head_dim], for K of a "+mean" variant
};
// `codec` with its prefix. Throws Error for unknown names, missing means, and head sizes that the method cannot have.
std::shared_ptr<const Codec> make_rival(std::string_view codec, bool is_k, RivalLayer layer);

}  // namespace oscar

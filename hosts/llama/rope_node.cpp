#include "rope_node.h"

#include <cmath>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar::llama {
namespace {

float float_param(const ggml_tensor* node, int index) {
  float value = 0;
  std::memcpy(&value, &node->op_params[index], sizeof(value));
  return value;
}

bool close(float a, float b) { return std::fabs(a - b) <= 1e-6F * std::fmax(std::fabs(a), std::fabs(b)); }

}  // namespace

RopeParams rope_params(const ggml_tensor* rope) {
  // Layout of op_params: ggml_rope_impl() of the certified releases.
  RopeParams p;
  const int mode = rope->op_params[2];
  if (mode == GGML_ROPE_TYPE_VISION) fail("RoPE of kind 'vision' is not supported");
  if (rope->op_params[15] != 0) fail("RoPE that starts at dimension {} of a head is not supported", rope->op_params[15]);
  // Multi-section RoPE equals NeoX for text, where all sections carry the same position.
  p.pairing = (mode & (GGML_ROPE_TYPE_NEOX | GGML_ROPE_TYPE_MROPE)) != 0 ? RopePairing::neox : RopePairing::norm;
  p.n_rot = rope->op_params[1];
  p.n_ctx_orig = rope->op_params[4];
  p.base = float_param(rope, 5);
  p.freq_scale = float_param(rope, 6);
  p.ext_factor = float_param(rope, 7);
  p.attn_factor = float_param(rope, 8);
  p.beta_fast = float_param(rope, 9);
  p.beta_slow = float_param(rope, 10);
  if (const ggml_tensor* factors = rope->src[2]; factors != nullptr) {
    if (factors->type != GGML_TYPE_F32 || factors->data == nullptr || factors->ne[0] < p.n_rot / 2) {
      fail("the RoPE frequency factors '{}' cannot be read", factors->name);
    }
    const auto* values = static_cast<const float*>(factors->data);
    p.freq_factors.assign(values, values + p.n_rot / 2);
  }
  return p;
}

const ggml_tensor* rope_feeding(const ggml_tensor* set_rows) {
  const ggml_tensor* t = set_rows->src[0];
  while (t != nullptr) {
    switch (t->op) {
      case GGML_OP_ROPE:
        return t;
      case GGML_OP_VIEW:
      case GGML_OP_RESHAPE:
      case GGML_OP_PERMUTE:
      case GGML_OP_TRANSPOSE:
      case GGML_OP_CONT:
      case GGML_OP_CPY:
        t = t->src[0];
        break;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

std::span<const std::int32_t> rope_positions(const ggml_tensor* rope) {
  const ggml_tensor* source = rope->src[1];
  if (rope->op != GGML_OP_ROPE || source == nullptr || source->type != GGML_TYPE_I32 || source->data == nullptr) return {};
  if (root_of(source)->op != GGML_OP_NONE) return {};  // computed inside the graph: not known yet
  // Multi-section RoPE stores four positions per token, the first n_tokens are the ones that order the text.
  const std::int64_t n = rope->ne[2];
  if (n > source->ne[0]) return {};
  return {static_cast<const std::int32_t*>(source->data), static_cast<std::size_t>(n)};
}

std::string difference(const RopeParams& a, const RopeParams& b) {
  if (a.pairing != b.pairing) return "kind of RoPE";
  if (a.pairing == RopePairing::none) return {};
  if (a.n_rot != b.n_rot) return fmt::format("rotated dimensions {} against {}", a.n_rot, b.n_rot);
  if (!close(a.base, b.base)) return fmt::format("frequency base {} against {}", a.base, b.base);
  if (!close(a.freq_scale, b.freq_scale)) return fmt::format("frequency scale {} against {}", a.freq_scale, b.freq_scale);
  if (!close(a.ext_factor, b.ext_factor)) return fmt::format("YaRN factor {} against {}", a.ext_factor, b.ext_factor);
  if (!close(a.attn_factor, b.attn_factor)) return fmt::format("magnitude {} against {}", a.attn_factor, b.attn_factor);
  if (a.ext_factor != 0.0F) {
    if (a.n_ctx_orig != b.n_ctx_orig) return fmt::format("original context {} against {}", a.n_ctx_orig, b.n_ctx_orig);
    if (!close(a.beta_fast, b.beta_fast) || !close(a.beta_slow, b.beta_slow)) return "YaRN ramp";
  }
  if (a.freq_factors.size() != b.freq_factors.size()) return "number of frequency factors";
  for (std::size_t i = 0; i < a.freq_factors.size(); ++i) {
    if (!close(a.freq_factors[i], b.freq_factors[i])) return fmt::format("frequency factor {}", i);
  }
  return {};
}

}  // namespace oscar::llama

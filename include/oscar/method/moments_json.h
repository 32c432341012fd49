// LayerShape, RopeParams and TextSource as JSON, shared by moments files and artifacts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "oscar/io/json.h"
#include "oscar/method/moments.h"

namespace oscar {

inline nlohmann::json to_json(const RopeParams& rope) {
  const char* pairing = rope.pairing == RopePairing::norm ? "norm" : (rope.pairing == RopePairing::neox ? "neox" : "none");
  return {{"pairing", pairing},
          {"n_rot", rope.n_rot},
          {"base", rope.base},
          {"freq_scale", rope.freq_scale},
          {"ext_factor", rope.ext_factor},
          {"attn_factor", rope.attn_factor},
          {"beta_fast", rope.beta_fast},
          {"beta_slow", rope.beta_slow},
          {"n_ctx_orig", rope.n_ctx_orig},
          {"freq_factors", rope.freq_factors}};
}

// `what` names the thing in errors: "rope of layer 3 of 'file'".
inline RopeParams rope_from_json(const nlohmann::json& json, std::string_view what) {
  RopeParams rope;
  const std::string& pairing = json_text(json, "pairing", what);
  if (pairing == "norm") {
    rope.pairing = RopePairing::norm;
  } else if (pairing == "neox") {
    rope.pairing = RopePairing::neox;
  } else if (pairing != "none") {
    fail("'pairing' of {} is '{}'; none, norm and neox are known", what, pairing);
  }
  rope.n_rot = json_count(json, "n_rot", what);
  rope.base = json_float(json, "base", what);
  rope.freq_scale = json_float(json, "freq_scale", what);
  rope.ext_factor = json_float(json, "ext_factor", what);
  rope.attn_factor = json_float(json, "attn_factor", what);
  rope.beta_fast = json_float(json, "beta_fast", what);
  rope.beta_slow = json_float(json, "beta_slow", what);
  rope.n_ctx_orig = json_count(json, "n_ctx_orig", what);
  for (const nlohmann::json& factor : json_array(json, "freq_factors", what)) {
    if (!factor.is_number() || !std::isfinite(factor.get<float>()))
      fail("a frequency factor of {} is not a finite number", what);
    rope.freq_factors.push_back(factor.get<float>());
  }
  return rope;
}

inline nlohmann::json to_json(const LayerShape& shape) {
  return {{"layer", shape.layer},       {"n_head", shape.n_head}, {"n_head_kv", shape.n_head_kv},
          {"k_dim", shape.k_dim},       {"v_dim", shape.v_dim},   {"sliding_window", shape.sliding_window},
          {"rope", to_json(shape.rope)}};
}

inline LayerShape layer_shape_from_json(const nlohmann::json& json, std::string_view file) {
  LayerShape shape;
  shape.layer = json_count(json, "layer", fmt::format("a layer of {}", file));
  const std::string what = fmt::format("layer {} of {}", shape.layer, file);
  shape.n_head = json_count(json, "n_head", what);
  shape.n_head_kv = json_count(json, "n_head_kv", what);
  shape.k_dim = json_count(json, "k_dim", what);
  shape.v_dim = json_count(json, "v_dim", what);
  shape.sliding_window = json_bool(json, "sliding_window", what);
  shape.rope = rope_from_json(json_field(json, "rope", what), "the rope of " + what);
  if (shape.n_head == 0 || shape.n_head_kv == 0 || shape.k_dim == 0 || shape.v_dim == 0 ||
      shape.n_head % shape.n_head_kv != 0) {
    fail("{} has impossible geometry: {} query heads, {} KV heads, head sizes {} and {}", what, shape.n_head, shape.n_head_kv,
         shape.k_dim, shape.v_dim);
  }
  return shape;
}

inline nlohmann::json to_json(const TextSource& source) {
  return {{"name", source.name}, {"sha256", source.sha256}, {"tokens", source.tokens}};
}

inline TextSource text_source_from_json(const nlohmann::json& json, std::string_view what) {
  return {json_text(json, "name", what), json_text(json, "sha256", what), json_integer(json, "tokens", what, 0)};
}

}  // namespace oscar

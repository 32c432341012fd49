#include "oscar/artifact/artifact.h"

#include <algorithm>
#include <cstdlib>

#include "oscar/base/error.h"
#include "oscar/codec/int2.h"
#include "oscar/codec/spectral.h"
#include "oscar/rivals/rivals.h"

namespace oscar {

MeanMode parse_mean_mode(std::string_view text) {
  if (text == "none") return MeanMode::none;
  if (text == "static") return MeanMode::statical;
  if (text == "rope") return MeanMode::rope;
  fail("mean mode '{}' is unknown; none, static and rope are known", text);
}

std::string_view to_string(MeanMode mode) {
  switch (mode) {
    case MeanMode::none:
      return "none";
    case MeanMode::statical:
      return "static";
    case MeanMode::rope:
      return "rope";
  }
  fail("mean mode {} is unknown", static_cast<int>(mode));
}

const LayerArtifact* Artifact::find(int layer) const {
  const auto found = std::lower_bound(layers.begin(), layers.end(), layer,
                                      [](const LayerArtifact& entry, int number) { return entry.shape.layer < number; });
  return found != layers.end() && found->shape.layer == layer ? &*found : nullptr;
}

Rates Recipe::rates_of(int layer) const {
  const auto found = std::lower_bound(layer_bits.begin(), layer_bits.end(), layer,
                                      [](const LayerRates& entry, int number) { return entry.layer < number; });
  if (found == layer_bits.end() || found->layer != layer) return {k_bits, v_bits};
  return {found->k.value_or(k_bits), found->v.value_or(v_bits)};
}

void set_rates(Recipe& recipe, const GivenRates& given) {
  const auto set = [&](const std::optional<double>& bits, double& all, std::optional<double> LayerRates::*half) {
    if (!bits) return;
    all = *bits;
    for (LayerRates& layer : recipe.layer_bits) (layer.*half).reset();
  };
  set(given.k, recipe.k_bits, &LayerRates::k);
  set(given.v, recipe.v_bits, &LayerRates::v);
  if (given.layers) recipe.layer_bits = *given.layers;
  for (LayerRates& layer : recipe.layer_bits) {
    if (layer.k == recipe.k_bits) layer.k.reset();
    if (layer.v == recipe.v_bits) layer.v.reset();
  }
  std::erase_if(recipe.layer_bits, [](const LayerRates& layer) { return !layer.k && !layer.v; });
}

std::string describe_rates(const Recipe& recipe) {
  const std::string rates = fmt::format("K {} bits V {} bits", recipe.k_bits, recipe.v_bits);
  return recipe.layer_bits.empty() ? rates : fmt::format("{}, by layer {}", rates, to_text(recipe.layer_bits));
}

void check_layer_bits(const Recipe& recipe, std::span<const LayerShape> layers) {
  for (const LayerRates& entry : recipe.layer_bits) {
    const auto layer = std::find_if(layers.begin(), layers.end(), [&](const LayerShape& s) { return s.layer == entry.layer; });
    if (layer == layers.end()) {
      fail("layer_bits names layer {}, which this model does not have: its layers are {} to {}", entry.layer,
           layers.front().layer, layers.back().layer);
    }
    if (layer->sliding_window)
      fail("layer_bits names layer {}, which has a sliding window and stays at 16 bit: leave it out", entry.layer);
  }
}

void check_layer_bits(const Recipe& recipe, const Artifact& artifact) {
  std::vector<LayerShape> layers;
  for (const LayerArtifact& layer : artifact.layers) layers.push_back(layer.shape);
  check_layer_bits(recipe, layers);
}

Rates mean_rates(const Artifact& artifact, const Recipe& recipe) {
  Rates sum{0, 0};
  double k_elements = 0, v_elements = 0;
  for (const LayerArtifact& layer : artifact.layers) {
    if (layer.shape.sliding_window) continue;
    const double k = static_cast<double>(layer.shape.n_head_kv) * layer.shape.k_dim;
    const double v = static_cast<double>(layer.shape.n_head_kv) * layer.shape.v_dim;
    const Rates rates = recipe.rates_of(layer.shape.layer);
    sum.k += k * rates.k;
    sum.v += v * rates.v;
    k_elements += k;
    v_elements += v;
  }
  if (k_elements == 0) return {recipe.k_bits, recipe.v_bits};
  return {sum.k / k_elements, sum.v / v_elements};
}

namespace {

const MatrixF& require_mean(const MatrixF& mean, const char* which) {
  if (mean.size() == 0) fail("the artifact holds no {}; choose another mean mode or calibrate again", which);
  return mean;
}

std::unique_ptr<Codec> key_codec(const LayerArtifact& layer, const Recipe& recipe) {
  Int2Config config;
  config.n_head_kv = layer.shape.n_head_kv;
  config.head_dim = layer.shape.k_dim;
  config.group_size = recipe.group_size;
  config.rotation = layer.k_rotation;
  config.clip = recipe.clip_k ? std::vector<float>{*recipe.clip_k} : layer.clip_k;
  switch (recipe.k_mean) {
    case MeanMode::none:
      break;
    case MeanMode::statical:
      config.mean_static = require_mean(layer.k_mean, "key mean");
      break;
    case MeanMode::rope:
      // Without a rotary embedding the row before it is the row itself: the same mean, removed as a constant.
      if (layer.shape.rope.pairing == RopePairing::none) {
        config.mean_static = require_mean(layer.k_mean_pre_rope, "key mean before RoPE");
      } else {
        config.mean_pre_rope = require_mean(layer.k_mean_pre_rope, "key mean before RoPE");
        config.rope = Rope(layer.shape.rope, layer.shape.k_dim);
      }
      break;
  }
  return make_int2_codec(std::move(config));
}

std::unique_ptr<Codec> value_codec(const LayerArtifact& layer, const Recipe& recipe) {
  Int2Config config;
  config.n_head_kv = layer.shape.n_head_kv;
  config.head_dim = layer.shape.v_dim;
  config.group_size = recipe.group_size;
  config.rotation = layer.v_rotation;
  config.clip = recipe.clip_v ? std::vector<float>{*recipe.clip_v} : layer.clip_v;
  if (recipe.v_mean == MeanMode::rope) fail("v_mean is 'rope'; values have no rotary embedding, only none and static work");
  if (recipe.v_mean == MeanMode::statical) config.mean_static = require_mean(layer.v_mean, "value mean");
  return make_int2_codec(std::move(config));
}

std::unique_ptr<Codec> spectral_key_codec(const LayerArtifact& layer, const Recipe& recipe) {
  const SpectralLayer& fitted = layer.spectral;
  const double bits = recipe.rates_of(layer.shape.layer).k;
  const auto rate = std::find(kSpectralRates.begin(), kSpectralRates.end(), bits);
  if (rate == kSpectralRates.end()) fail("k_bits is {}, not {}", bits, rate_names());
  if (recipe.k_mean != MeanMode::rope) {
    fail("the spectral codec was fitted with k_mean 'rope' and cannot run with '{}'; use codec int2 for that",
         to_string(recipe.k_mean));
  }
  const MatrixF& widths = fitted.width[static_cast<std::size_t>(rate - kSpectralRates.begin())];
  SpectralKeyConfig config;
  config.n_head_kv = layer.shape.n_head_kv;
  config.head_dim = layer.shape.k_dim;
  for (int h = 0; h < config.n_head_kv; ++h) {
    SpectralKeyHead& head = config.heads.emplace_back();
    head.transform = fitted.transform[static_cast<std::size_t>(h)];
    head.inverse = fitted.inverse[static_cast<std::size_t>(h)];
    for (int d = 0; d < config.head_dim; ++d) {
      const int width = static_cast<int>(widths(h, d));
      head.width.push_back(width);
      head.step.push_back(width == 0 ? 1.0F : fitted.step[static_cast<std::size_t>(width / 2 - 1)](h, d));
      head.inverse_sigma.push_back(fitted.inverse_sigma(h, d));
    }
  }
  config.mean = fitted.mean;
  const MatrixF& pre_rope = require_mean(layer.k_mean_pre_rope, "key mean before RoPE");
  if (layer.shape.rope.pairing == RopePairing::none) {
    config.mean += pre_rope;
  } else {
    config.mean_pre_rope = pre_rope;
    config.rope = Rope(layer.shape.rope, layer.shape.k_dim);
  }
  return make_spectral_key_codec(std::move(config));
}

std::unique_ptr<Codec> spectral_value_codec(const LayerArtifact& layer, const Recipe& recipe) {
  if (recipe.v_mean != MeanMode::none) {
    fail("the spectral codec has no v_mean, but '{}' is asked for; use codec int2 for that", to_string(recipe.v_mean));
  }
  SpectralValueConfig config;
  config.n_head_kv = layer.shape.n_head_kv;
  config.head_dim = layer.shape.v_dim;
  config.bits = recipe.rates_of(layer.shape.layer).v;
  config.signs = layer.spectral.v_signs;
  config.scale = layer.spectral.v_scale;
  return make_spectral_value_codec(std::move(config));
}

// The name says whether the mean is removed; nothing else of the recipe concerns rivals.
LayerCodecs rival_codecs(const LayerArtifact& layer, const Recipe& recipe) {
  const LayerShape& shape = layer.shape;
  RivalLayer k{shape.n_head_kv, shape.k_dim, {}, layer.k_mean_pre_rope};
  if (shape.rope.pairing != RopePairing::none) k.rope = Rope(shape.rope, shape.k_dim);
  return {make_rival(recipe.codec, true, std::move(k)),
          make_rival(recipe.codec, false, {shape.n_head_kv, shape.v_dim, {}, {}})};
}

}  // namespace

LayerCodecs make_codecs(const LayerArtifact& layer, const Recipe& recipe) {
  if (is_rival(recipe.codec)) {
    check_rival(recipe.codec);
  } else if (recipe.codec != "int2" && recipe.codec != "spectral") {
    fail("codec '{}' is unknown; int2, spectral and sim:NAME are known", recipe.codec);
  }
  try {
    if (is_rival(recipe.codec)) return rival_codecs(layer, recipe);
    if (recipe.codec == "spectral") {
      if (layer.spectral.empty()) {
        fail(
            "the artifact has no spectral codec (it was converted, or calibrated by an older version); calibrate again or use "
            "codec "
            "int2");
      }
      return {spectral_key_codec(layer, recipe), spectral_value_codec(layer, recipe)};
    }
    if (layer.k_rotation.empty() || layer.v_rotation.empty()) fail("it was not calibrated, so it has no codec");
    return {key_codec(layer, recipe), value_codec(layer, recipe)};
  } catch (const Error& error) {
    fail("layer {}: {}", layer.shape.layer, error.what());
  }
}

std::filesystem::path cache_dir() {
  if (const char* folder = std::getenv("OSCAR_CACHE_DIR"); folder != nullptr && *folder != '\0') return folder;
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') fail("neither OSCAR_CACHE_DIR nor HOME is set; set one to a folder for OSCAR's files");
  return std::filesystem::path(home) / ".cache" / "oscar";
}

std::optional<std::filesystem::path> find_artifact(const std::filesystem::path& model, const std::string& explicit_path,
                                                   const std::string& fingerprint) {
  constexpr const char* kSuffix = ".oscar.safetensors";
  std::error_code ignored;  // an unreadable folder is a folder without an artifact
  if (!explicit_path.empty()) {
    if (!std::filesystem::exists(explicit_path, ignored)) fail("the artifact '{}' does not exist", explicit_path);
    return explicit_path;
  }
  if (const char* named = std::getenv("OSCAR_ARTIFACT"); named != nullptr && *named != '\0') {
    if (!std::filesystem::exists(named, ignored)) fail("OSCAR_ARTIFACT names '{}', which does not exist", named);
    return named;
  }
  std::vector<std::filesystem::path> candidates;
  if (!model.empty()) {
    candidates.emplace_back(model.string() + kSuffix);
    if (model.extension() == ".gguf") {
      candidates.emplace_back(std::filesystem::path(model).replace_extension().string() + kSuffix);
    }
  }
  if (!fingerprint.empty()) candidates.push_back(cache_dir() / "artifacts" / (fingerprint + kSuffix));
  for (const auto& candidate : candidates) {
    if (std::filesystem::exists(candidate, ignored)) return candidate;
  }
  return std::nullopt;
}

}  // namespace oscar

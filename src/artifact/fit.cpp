// The fit: moments in, artifact out. Everything here is deterministic, so equal moments give equal bytes.
#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "fit_clip.h"
#include "fit_quality.h"
#include "fit_rotation.h"
#include "fit_spectral.h"
#include "objective.h"
#include "oscar/artifact/artifact.h"
#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/error.h"
#include "oscar/codec/spectral.h"
#include "oscar/method/moments_json.h"
#include "oscar/method/rotation.h"
#include "oscar/version.h"

namespace oscar {
namespace {

constexpr double kUselessError = 1.0;    // rounding error above the keys' own variation: nothing of them survives
constexpr double kHighError = 0.5;       // far above what 2 bits cost a well-behaved row (0.10 to 0.25)
constexpr std::int64_t kKeyFloor = 256;  // keys that some query would read as codes: fewer say nothing about a covariance
constexpr double kLargeMeanShare = 0.5;  // more than half of the keys' energy is one constant
// Noise of coded keys at the output of attention, relative to that output: where more bits pay, and where text suffers visibly.
// On SmolLM2 at 2 bits layers have 0.004 to 0.05 and KL is 0.01; with codec int2 up to 0.27 and 0.04.
constexpr double kHighNoise = 0.10;
constexpr double kUselessNoise = 0.50;
constexpr double kSharedPenalty = 1.5;  // a layer-wide rotation this much worse than one per head is worth a word

using Heads = std::span<const HeadMoments>;

void check_recipe(const Recipe& recipe) {
  if (recipe.codec != "int2" && recipe.codec != "spectral") {
    fail("codec '{}' cannot be fitted; int2 and spectral can", recipe.codec);
  }
  if (is_value_objective(recipe.k_objective)) {
    fail("k_objective '{}' is for values; use qqt, ktk or hadamard with a composition, as in qqt_r_h_pbr", recipe.k_objective);
  }
  if (is_key_objective(recipe.v_objective)) {
    fail("v_objective '{}' is for keys; use sst, oot, vtv or hadamard with a composition, as in sst_r_h_pbr",
         recipe.v_objective);
  }
  if (recipe.v_mean == MeanMode::rope) fail("v_mean is 'rope'; values have no rotary embedding, only none and static work");
}

void check_heads(const LayerShape& shape, Heads heads, std::int64_t token_floor) {
  if (heads.size() != static_cast<std::size_t>(shape.n_head_kv)) {
    fail("layer {}: the moments hold {} KV heads of {}", shape.layer, heads.size(), shape.n_head_kv);
  }
  for (const HeadMoments& head : heads) {
    if (head.tokens < token_floor) {
      fail("layer {}: calibration saw {} tokens, but at least {} are needed: calibrate on more text", shape.layer, head.tokens,
           token_floor);
    }
    if (head.sample_positions != heads.front().sample_positions) fail("layer {}: its heads saw different tokens", shape.layer);
    const auto n = static_cast<Eigen::Index>(head.sample_positions.size());
    if (head.k_samples.rows() != n || head.v_samples.rows() != n || head.q_moment.rows() != shape.k_dim ||
        head.v_moment.rows() != shape.v_dim) {
      fail("layer {}: its moments or samples do not have the layer's shape", shape.layer);
    }
  }
}

void fit_means(Heads heads, LayerArtifact& layer) {
  const auto n = static_cast<Eigen::Index>(heads.size());
  layer.k_mean_pre_rope.resize(n, layer.shape.k_dim);
  layer.k_mean.resize(n, layer.shape.k_dim);
  layer.v_mean.resize(n, layer.shape.v_dim);
  for (Eigen::Index h = 0; h < n; ++h) {
    const HeadMoments& head = heads[static_cast<std::size_t>(h)];
    const auto tokens = static_cast<double>(std::max<std::int64_t>(1, head.tokens));
    layer.k_mean_pre_rope.row(h) = (head.k_pre_sum / tokens).cast<float>();
    layer.k_mean.row(h) = (head.k_sum / tokens).cast<float>();
    layer.v_mean.row(h) = (head.v_sum / tokens).cast<float>();
  }
}

// One threshold per rotation. `samples_of(h)`: the head's rows as the codec's clipping step sees them.
template <class SamplesOf>
std::vector<float> fit_clips(std::size_t n_heads, const Recipe& recipe, SamplesOf samples_of) {
  std::vector<float> clips;
  std::vector<ClipSamples> pool;
  for (std::size_t h = 0; h < n_heads; ++h) {
    pool.push_back(samples_of(h));
    if (!recipe.per_head && h + 1 < n_heads) continue;
    clips.push_back(fit_clip(pool, recipe.group_size));
    pool.clear();
  }
  return clips;
}

std::vector<float> fit_key_clips(Heads heads, const LayerArtifact& layer, const Recipe& recipe) {
  return fit_clips(heads.size(), recipe, [&](std::size_t h) {
    const HeadMoments& head = heads[h];
    const MatrixF& rotation = layer.k_rotation[recipe.per_head ? h : 0];
    const MatrixD basis = rotation.cast<double>();
    const MatrixF rows = centred_keys(head.k_samples, head.sample_positions, layer, static_cast<int>(h), recipe.k_mean);
    return ClipSamples{rows * rotation, basis.transpose() * normalised_moment(head, "qqt", layer.shape.layer) * basis};
  });
}

std::vector<float> fit_value_clips(Heads heads, const LayerArtifact& layer, const Recipe& recipe) {
  return fit_clips(heads.size(), recipe, [&](std::size_t h) {
    MatrixF rows = heads[h].v_samples;
    if (recipe.v_mean == MeanMode::statical) rows.rowwise() -= layer.v_mean.row(static_cast<Eigen::Index>(h));
    return ClipSamples{rows * layer.v_rotation[recipe.per_head ? h : 0], MatrixD()};
  });
}

// Why a layer cannot have the spectral codec; empty: it can.
std::string spectral_obstacle(const LayerShape& shape, Heads heads) {
  if (heads.front().importance.empty()) {
    return "the moments hold no importance statistics, which the spectral codec needs: calibrate again, or fit codec int2";
  }
  if (heads.front().importance.tokens < kKeyFloor) {
    return fmt::format(
        "only {} keys became old enough to be read as codes, and the spectral codec needs {}: use longer sequences (-c) "
        "or more text",
        heads.front().importance.tokens, kKeyFloor);
  }
  if (shape.k_dim % kSpectralQuad != 0 || shape.v_dim % kSpectralSlots != 0) {
    return fmt::format("the spectral codec needs head sizes that {} (K) and {} (V) divide, not {} and {}: use codec int2",
                       kSpectralQuad, kSpectralSlots, shape.k_dim, shape.v_dim);
  }
  return {};
}

// Everything but the widths of spectral keys, which the layers share out.
LayerArtifact fit_layer(const LayerShape& shape, Heads heads, const Recipe& recipe, std::vector<std::string>* warnings,
                        QuadErrors& errors) {
  LayerArtifact layer;
  layer.shape = shape;
  fit_means(heads, layer);
  FittedRotations k = fit_rotations(heads, parse_objective(recipe.k_objective), shape.k_dim, recipe.per_head, shape.layer);
  FittedRotations v = fit_rotations(heads, parse_objective(recipe.v_objective), shape.v_dim, recipe.per_head, shape.layer);
  layer.k_rotation = std::move(k.rotation);
  layer.v_rotation = std::move(v.rotation);
  layer.k_eigenvalues = std::move(k.eigenvalues);
  layer.v_eigenvalues = std::move(v.eigenvalues);
  if (warnings != nullptr) {
    warnings->insert(warnings->end(), k.warnings.begin(), k.warnings.end());
    warnings->insert(warnings->end(), v.warnings.begin(), v.warnings.end());
  }
  const std::size_t matrices = layer.k_rotation.size();
  layer.clip_k = recipe.clip_k ? std::vector<float>(matrices, *recipe.clip_k) : fit_key_clips(heads, layer, recipe);
  layer.clip_v = recipe.clip_v ? std::vector<float>(matrices, *recipe.clip_v) : fit_value_clips(heads, layer, recipe);
  std::vector<std::string> notes;
  std::vector<std::string>& spectral_warnings = warnings != nullptr ? *warnings : notes;
  const std::string obstacle = spectral_obstacle(shape, heads);
  if (obstacle.empty()) {
    layer.spectral = fit_spectral(layer, heads, spectral_warnings, errors);
  } else if (recipe.codec == "spectral") {
    fail("layer {}: {}", shape.layer, obstacle);
  } else if (!heads.front().importance.empty()) {
    spectral_warnings.push_back(fmt::format("layer {}: {}", shape.layer, obstacle));
  }
  return layer;
}

std::string flag_of(const HeadQuality& quality, const Recipe& recipe) {
  std::vector<std::string> reasons;
  const bool mean_kept = recipe.k_mean != MeanMode::rope;
  const bool int2 = recipe.codec == "int2";  // spectral keys are judged by their noise at the layer's output
  if (quality.mean_share > kLargeMeanShare && mean_kept) {
    reasons.push_back(fmt::format("{:.1f} % of the key energy is its mean", 100.0 * quality.mean_share));
  }
  if (int2 && quality.k_varying_error > kUselessError) {
    reasons.push_back(fmt::format("key rounding error is {:.1f} times the keys' own variation", quality.k_varying_error));
  } else if (int2 && quality.k_varying_error > kHighError) {
    reasons.push_back(fmt::format("key rounding error is {:.2f} of the keys' own variation", quality.k_varying_error));
  }
  if (quality.v_error > kHighError)
    reasons.push_back(fmt::format("value rounding error is {:.2f} of the values", quality.v_error));
  if (reasons.empty()) return {};
  if (mean_kept && quality.mean_share > kLargeMeanShare)
    reasons.emplace_back("remove the mean (k_mean rope) or keep this layer at 16 bit");
  return fmt::format("{}", fmt::join(reasons, "; "));
}

// A layer-wide rotation against one per head, thresholds fitted for each.
void compare_with_per_head(const LayerShape& shape, Heads heads, const Recipe& recipe, const std::vector<HeadQuality>& shared,
                           FitReport& report) {
  Recipe own = recipe;
  own.per_head = true;
  QuadErrors unused;
  const std::vector<HeadQuality> per_head = measure(fit_layer(shape, heads, own, nullptr, unused), own, heads);
  double k_shared = 0;
  double k_own = 0;
  double v_shared = 0;
  double v_own = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    k_shared += shared[h].k_error;
    k_own += per_head[h].k_error;
    v_shared += shared[h].v_error;
    v_own += per_head[h].v_error;
  }
  const auto warn = [&](const char* what, double with_shared, double with_own) {
    if (with_shared <= kSharedPenalty * with_own) return;
    report.warnings.push_back(fmt::format(
        "layer {}: one rotation for all KV heads leaves a {} error of {:.3f}, one per head {:.3f}: use per-head rotations",
        shape.layer, what, with_shared / static_cast<double>(heads.size()), with_own / static_cast<double>(heads.size())));
  };
  warn("key", k_shared, k_own);
  warn("value", v_shared, v_own);
}

void report_layer(const LayerArtifact& layer, Heads heads, const Recipe& recipe, FitReport& report) {
  const std::vector<HeadQuality> quality = measure(layer, recipe, heads);
  const std::vector<double> overlaps = head_overlaps(heads, layer.shape.layer);
  std::vector<HeadQuality> plain;
  if (recipe.codec == "spectral") {
    Recipe int2 = recipe;
    int2.codec = "int2";
    plain = measure(layer, int2, heads);
  }
  for (std::size_t h = 0; h < heads.size(); ++h) {
    FitReport::Row row;
    row.layer = layer.shape.layer;
    row.head = static_cast<int>(h);
    row.k_error = quality[h].k_error;
    row.v_error = quality[h].v_error;
    row.mean_share = quality[h].mean_share;
    row.head_overlap = overlaps[h];
    row.clip_k = layer.clip_k[layer.clip_k.size() == 1 ? 0 : h];
    row.clip_v = layer.clip_v[layer.clip_v.size() == 1 ? 0 : h];
    row.key_noise = quality[h].key_noise;
    row.key_noise_int2 = plain.empty() ? quality[h].key_noise : plain[h].key_noise;
    row.output_energy = quality[h].output_energy;
    row.flag = flag_of(quality[h], recipe);
    if (recipe.codec == "int2" && quality[h].k_varying_error > kUselessError) report.go = false;
    report.rows.push_back(std::move(row));
  }
  if (recipe.codec == "int2" && !recipe.per_head && heads.size() > 1)
    compare_with_per_head(layer.shape, heads, recipe, quality, report);
}

// What coded keys add to a layer's output, relative to that output. `heads`: of one layer, HeadQuality or FitReport::Row.
template <class Rows>
double relative_noise(const Rows& heads) {
  double noise = 0;
  double output = 0;
  for (const auto& head : heads) {
    noise += head.key_noise;
    output += head.output_energy;
  }
  return output > 0 ? std::sqrt(noise / output) : 0.0;
}

struct Worst {
  double noise = 0;
  int layer = 0;
  void take(double other, int number) {
    if (other > noise) *this = {other, number};
  }
};

// Text that hardly varies gives statistics that say nothing about other text, however small the errors on it: empty, or a
// sentence about the first head whose keys or values do not span half of their directions.
std::string starved(const ModelMoments& moments) {
  for (std::size_t i = 0; i < moments.layers.size(); ++i) {
    const std::vector<HeadMoments>& heads = moments.layers[i];
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (const auto& [rows, moment] : {std::pair{"keys", "ktk"}, std::pair{"values", "vtv"}}) {
        const VectorD values = symmetric_eigen(normalised_moment(heads[h], moment, moments.shapes[i].layer)).values;
        const auto rank = numerical_rank(values);
        if (2 * rank < values.size()) {
          return fmt::format("the {} of layer {} head {} vary in {} of {} directions: calibrate on more varied text", rows,
                             moments.shapes[i].layer, h, rank, values.size());
        }
      }
    }
  }
  return {};
}

// By the noise of coded keys. A layer where it is high gets the lowest rate that makes it acceptable, or else the highest.
void conclude_by_noise(FitReport& report, const Artifact& artifact, const ModelMoments& moments) {
  const Recipe& recipe = artifact.recipe;
  Worst fitted;
  Worst advised;
  std::vector<int> high;
  std::vector<int> useless;
  std::vector<LayerRates> raised;
  auto row = report.rows.begin();
  for (std::size_t i = 0; i < artifact.layers.size(); ++i) {
    const Heads heads(moments.layers[i]);
    if (heads.empty()) continue;
    const int number = artifact.layers[i].shape.layer;
    Rates rates = recipe.rates_of(number);
    double noise = relative_noise(std::span(row, heads.size()));
    row += static_cast<std::ptrdiff_t>(heads.size());
    fitted.take(noise, number);
    const double own = rates.k;
    for (const double rate : kSpectralRates) {
      if (rate <= own || noise <= kHighNoise) continue;
      Recipe more = recipe;
      more.layer_bits = {{number, rate, rates.v}};
      noise = relative_noise(measure(artifact.layers[i], more, heads));
      rates.k = rate;
    }
    if (rates.k != own) raised.push_back({number, rates.k, std::nullopt});
    advised.take(noise, number);
    if (noise > kUselessNoise) {
      useless.push_back(number);
    } else if (noise > kHighNoise) {
      high.push_back(number);
    }
  }
  report.advised_layer_bits = recipe.layer_bits;
  for (const LayerRates& layer : raised) {  // the flag replaces what the recipe says, so it has to repeat it
    auto& all = report.advised_layer_bits;
    auto at = std::lower_bound(all.begin(), all.end(), layer.layer, [](const LayerRates& l, int n) { return l.layer < n; });
    if (at == all.end() || at->layer != layer.layer) at = all.insert(at, {layer.layer, std::nullopt, std::nullopt});
    at->k = layer.k;
  }
  const std::string why =
      fmt::format("coded keys add at most {:.1f} % to a layer's output (layer {})", 100 * fitted.noise, fitted.layer);
  const std::string flag = raised.empty() ? std::string()
                                          : fmt::format("--layer-bits {} makes it {:.1f} % (layer {})",
                                                        to_text(report.advised_layer_bits), 100 * advised.noise, advised.layer);
  const std::string but = flag.empty() ? why : fmt::format("{}; {}", why, flag);
  const std::string hungry = starved(moments);
  report.go = useless.empty() && hungry.empty();
  if (!hungry.empty()) {
    report.verdict = "no-go: " + hungry;
  } else if (!useless.empty()) {
    report.verdict = fmt::format("no-go: even with {} bits for K the noise stays over {:.0f} % in layers {}; {}",
                                 kSpectralRates.back(), 100 * kUselessNoise, fmt::join(useless, ", "), but);
  } else if (!high.empty()) {
    report.verdict = fmt::format("go, with care: {}; even with {} bits for K it stays over {:.0f} % in layers {}", but,
                                 kSpectralRates.back(), 100 * kHighNoise, fmt::join(high, ", "));
  } else if (!flag.empty()) {
    report.verdict = fmt::format("go with --layer-bits {}: {}", to_text(report.advised_layer_bits), but);
  } else {
    report.verdict = "go: " + why;
  }
}

void conclude(FitReport& report) {
  std::vector<int> layers;
  std::size_t flagged = 0;
  for (const FitReport::Row& row : report.rows) {
    if (row.flag.empty()) continue;
    ++flagged;
    if (layers.empty() || layers.back() != row.layer) layers.push_back(row.layer);
  }
  const std::string where =
      fmt::format("{} of {} heads worrying, in layers {}", flagged, report.rows.size(), fmt::join(layers, ", "));
  if (!report.go) {
    report.verdict = "no-go: the keys of some heads would not survive 2 bits; " + where;
  } else {
    report.verdict = flagged == 0 ? "go: no head is worrying" : "go, with care: " + where;
  }
}

std::int64_t fewest_tokens(const ModelMoments& moments) {
  std::int64_t fewest = -1;
  for (const auto& heads : moments.layers) {
    if (!heads.empty() && (fewest < 0 || heads.front().tokens < fewest)) fewest = heads.front().tokens;
  }
  return fewest;
}

}  // namespace

Artifact fit(const ModelMoments& moments, const FitOptions& options, FitReport* report) {
  check_recipe(options.recipe);
  if (moments.shapes.size() != moments.layers.size()) {
    fail("the moments hold {} layers and {} shapes", moments.layers.size(), moments.shapes.size());
  }
  const std::int64_t tokens = fewest_tokens(moments);
  if (tokens < 0) fail("the moments hold no full-attention layer: there is nothing to fit");

  FitReport own;
  FitReport& notes = report != nullptr ? *report : own;
  notes = {};
  Artifact artifact;
  artifact.model = {moments.model_fingerprint, moments.architecture, moments.model_name, moments.n_layer};
  artifact.recipe = options.recipe;
  artifact.date = moments.date;
  artifact.tool_version = version();
  std::vector<std::size_t> work;  // layers to fit
  for (std::size_t i = 0; i < moments.shapes.size(); ++i) {
    const LayerShape& shape = moments.shapes[i];
    if (moments.layers[i].empty()) {
      if (!shape.sliding_window) fail("layer {}: its moments are missing", shape.layer);
      artifact.layers.emplace_back().shape = shape;
      continue;
    }
    const Heads heads(moments.layers[i]);
    check_heads(shape, heads, options.token_floor);
    work.push_back(i);
    artifact.layers.emplace_back();
  }
  std::vector<FitReport> reports(work.size());
  std::vector<QuadErrors> errors(work.size());
  parallel_for(work.size(), options.threads, [&](std::size_t w) {
    artifact.layers[work[w]] =
        fit_layer(moments.shapes[work[w]], Heads(moments.layers[work[w]]), options.recipe, &reports[w].warnings, errors[w]);
  });
  std::vector<SpectralLayer*> spectral;
  std::erase_if(errors, [](const QuadErrors& layer) { return layer.empty(); });
  for (const std::size_t layer : work) {
    if (!artifact.layers[layer].spectral.empty()) spectral.push_back(&artifact.layers[layer].spectral);
  }
  share_widths(spectral, errors);
  if (report != nullptr) {
    parallel_for(work.size(), options.threads, [&](std::size_t w) {
      report_layer(artifact.layers[work[w]], Heads(moments.layers[work[w]]), options.recipe, reports[w]);
    });
  }
  for (FitReport& of_layer : reports) {
    notes.rows.insert(notes.rows.end(), of_layer.rows.begin(), of_layer.rows.end());
    notes.warnings.insert(notes.warnings.end(), of_layer.warnings.begin(), of_layer.warnings.end());
    notes.go = notes.go && of_layer.go;
  }
  if (options.recipe.codec == "spectral") {
    if (report != nullptr) conclude_by_noise(notes, artifact, moments);
  } else {
    conclude(notes);
  }

  artifact.provenance["tokens"] = tokens;
  artifact.provenance["fit_revision"] = kFitRevision;
  artifact.provenance["sources"] = nlohmann::json::array();
  for (const TextSource& source : moments.sources) {
    artifact.provenance["sources"].push_back(to_json(source));
  }
  validate(artifact);
  return artifact;
}

}  // namespace oscar

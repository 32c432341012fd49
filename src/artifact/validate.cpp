// What every artifact must satisfy, whether it was just fitted, converted or loaded.
#include <algorithm>
#include <cmath>

#include "objective.h"
#include "oscar/artifact/artifact.h"
#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/error.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

constexpr double kMaxOrthogonalityError = 1e-3;

void check_recipe(const Recipe& recipe) {
  if (recipe.codec != "int2" && recipe.codec != "spectral") {
    fail("the recipe's codec '{}' is unknown; int2 and spectral are known", recipe.codec);
  }
  for (const double bits : {recipe.k_bits, recipe.v_bits}) {
    if (!is_rate(bits)) fail("the recipe's {} bits are not {}", bits, rate_names());
  }
  if (recipe.v_mean == MeanMode::rope) fail("the recipe's v_mean is 'rope'; values have no rotary embedding");
  if (recipe.group_size < 0 || recipe.group_size % 4 != 0) {
    fail("the recipe's group_size {} is not 0 or a positive multiple of 4", recipe.group_size);
  }
  parse_objective(recipe.k_objective);
  parse_objective(recipe.v_objective);
  if (is_value_objective(recipe.k_objective)) fail("the recipe's k_objective '{}' belongs to values", recipe.k_objective);
  if (is_key_objective(recipe.v_objective)) fail("the recipe's v_objective '{}' belongs to keys", recipe.v_objective);
}

void check_shape(const LayerShape& shape) {
  if (shape.n_head <= 0 || shape.n_head_kv <= 0 || shape.n_head % shape.n_head_kv != 0) {
    fail("{} query heads cannot be shared by {} KV heads", shape.n_head, shape.n_head_kv);
  }
  if (shape.k_dim <= 0 || shape.v_dim <= 0) fail("head sizes {} and {} are not positive", shape.k_dim, shape.v_dim);
  const RopeParams& rope = shape.rope;
  for (const float value : {rope.base, rope.freq_scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow}) {
    if (!std::isfinite(value)) fail("a RoPE parameter is not finite");
  }
  if (!std::all_of(rope.freq_factors.begin(), rope.freq_factors.end(), [](float f) { return std::isfinite(f); })) {
    fail("a RoPE frequency factor is not finite");
  }
  if (rope.pairing != RopePairing::none) Rope(rope, shape.k_dim);  // its constructor checks the rest
}

void check_rotations(const std::vector<MatrixF>& rotations, int heads, int dim, bool per_head, const char* which) {
  const auto expected = static_cast<std::size_t>(per_head ? heads : 1);
  if (rotations.size() != expected) {
    fail("{} has {} matrices where the recipe (per_head {}) needs {}", which, rotations.size(), per_head, expected);
  }
  for (std::size_t head = 0; head < rotations.size(); ++head) {
    const MatrixF& rotation = rotations[head];
    if (rotation.rows() != dim || rotation.cols() != dim) {
      fail("{} of head {} is {} x {}, not {} x {}", which, head, rotation.rows(), rotation.cols(), dim, dim);
    }
    if (!rotation.allFinite()) fail("{} of head {} holds NaN or Inf", which, head);
    const double error = orthogonality_error(rotation);
    if (!(error <= kMaxOrthogonalityError)) {
      fail("{} of head {} is not orthogonal: max |R^T R - I| is {:.2g}, over {:.0e}", which, head, error,
           kMaxOrthogonalityError);
    }
  }
}

// An optional [rows, dim] matrix; `required_by` names what needs it, or null.
void check_rows(const MatrixF& matrix, Eigen::Index rows, int dim, const char* which, const char* required_by) {
  if (matrix.size() == 0) {
    if (required_by != nullptr) fail("{} is missing, which {} needs", which, required_by);
    return;
  }
  if (matrix.rows() != rows || matrix.cols() != dim) {
    fail("{} is {} x {}, not {} x {}", which, matrix.rows(), matrix.cols(), rows, dim);
  }
  if (!matrix.allFinite()) fail("{} holds NaN or Inf", which);
}

void check_clip(const std::vector<float>& clip, int heads, const char* which) {
  if (clip.size() != 1 && clip.size() != static_cast<std::size_t>(heads)) {
    fail("{} has {} values, not 1 or {}", which, clip.size(), heads);
  }
  for (const float ratio : clip) {
    if (!(ratio >= 0.0F && ratio <= 1.0F)) fail("{} is {}; it must be in (0, 1], or 0 for no clipping", which, ratio);
  }
}

// Whether a list of matrices is as long as it must be, each [rows, cols].
void check_matrices(const std::vector<MatrixF>& matrices, std::size_t count, int rows, int cols, const char* which) {
  if (matrices.empty()) fail("{} is missing, which the spectral codec needs", which);
  if (matrices.size() != count) fail("{} has {} matrices, not {}", which, matrices.size(), count);
  for (const MatrixF& m : matrices) check_rows(m, rows, cols, which, "the spectral codec");
}

// Shapes and values that no rate may read; the codec's constructor checks what the numbers must satisfy.
void check_spectral(const LayerArtifact& layer, const Recipe& recipe) {
  const SpectralLayer& s = layer.spectral;
  const LayerShape& shape = layer.shape;
  const bool none = s.empty() && s.inverse.empty() && s.mean.size() == 0 && s.inverse_sigma.size() == 0 && s.step.empty() &&
                    s.width.empty() && s.v_signs.size() == 0 && s.v_scale.empty();
  if (none) {
    if (recipe.codec == "spectral") fail("spectral.transform is missing, which the recipe's codec needs");
    return;
  }
  const auto heads = static_cast<std::size_t>(shape.n_head_kv);
  check_matrices(s.transform, heads, shape.k_dim, shape.k_dim, "spectral.transform");
  check_matrices(s.inverse, heads, shape.k_dim, shape.k_dim, "spectral.inverse");
  check_rows(s.mean, shape.n_head_kv, shape.k_dim, "spectral.mean", "the spectral codec");
  check_rows(s.inverse_sigma, shape.n_head_kv, shape.k_dim, "spectral.inverse_sigma", "the spectral codec");
  check_matrices(s.step, kSpectralWidths, shape.n_head_kv, shape.k_dim, "spectral.step");
  check_matrices(s.width, kSpectralRates.size(), shape.n_head_kv, shape.k_dim, "spectral.width");
  for (const MatrixF& m : s.width) {
    if (!(m.array() == 0 || m.array() == 2 || m.array() == 4 || m.array() == 6 || m.array() == 8).all()) {
      fail("spectral.width holds something else than 0, 2, 4, 6 and 8");
    }
  }
  check_rows(s.v_signs, shape.n_head_kv, shape.v_dim, "spectral.v_signs", "the spectral codec");
  if (s.v_scale.size() != heads) fail("spectral.v_scale has {} values, not {}", s.v_scale.size(), heads);
  check_rows(layer.k_mean_pre_rope, shape.n_head_kv, shape.k_dim, "k_mean_pre_rope", "the spectral codec");
  Recipe spectral;
  spectral.codec = "spectral";
  for (const double rate : kSpectralRates) {
    spectral.k_bits = spectral.v_bits = rate;
    make_codecs(layer, spectral);
  }
}

void check_layer(const LayerArtifact& layer, const Recipe& recipe) {
  const LayerShape& shape = layer.shape;
  check_shape(shape);
  if (shape.sliding_window && layer.k_rotation.empty() && layer.v_rotation.empty()) return;
  check_rotations(layer.k_rotation, shape.n_head_kv, shape.k_dim, recipe.per_head, "k_rotation");
  check_rotations(layer.v_rotation, shape.n_head_kv, shape.v_dim, recipe.per_head, "v_rotation");
  const auto matrices = static_cast<Eigen::Index>(layer.k_rotation.size());
  check_rows(layer.k_eigenvalues, matrices, shape.k_dim, "k_eigenvalues", nullptr);
  check_rows(layer.v_eigenvalues, matrices, shape.v_dim, "v_eigenvalues", nullptr);
  check_rows(layer.k_mean_pre_rope, shape.n_head_kv, shape.k_dim, "k_mean_pre_rope",
             recipe.k_mean == MeanMode::rope ? "k_mean 'rope'" : nullptr);
  check_rows(layer.k_mean, shape.n_head_kv, shape.k_dim, "k_mean",
             recipe.k_mean == MeanMode::statical ? "k_mean 'static'" : nullptr);
  check_rows(layer.v_mean, shape.n_head_kv, shape.v_dim, "v_mean",
             recipe.v_mean == MeanMode::statical ? "v_mean 'static'" : nullptr);
  check_clip(layer.clip_k, shape.n_head_kv, "clip_k");
  check_clip(layer.clip_v, shape.n_head_kv, "clip_v");
  check_spectral(layer, recipe);
}

}  // namespace

void validate(const Artifact& artifact) {
  check_recipe(artifact.recipe);
  if (artifact.recipe.clip_k) check_clip({*artifact.recipe.clip_k}, 1, "the recipe's clip_k");
  if (artifact.recipe.clip_v) check_clip({*artifact.recipe.clip_v}, 1, "the recipe's clip_v");
  if (artifact.model.n_layer <= 0) fail("the model has {} layers", artifact.model.n_layer);
  if (!artifact.provenance.is_object()) fail("provenance is not a JSON object");
  if (artifact.layers.empty()) fail("the artifact has no layers");
  check_layer_bits(artifact.recipe, artifact);
  int previous = -1;
  for (const LayerArtifact& layer : artifact.layers) {
    const int number = layer.shape.layer;
    if (number <= previous) fail("layer {} does not follow layer {}: layers must ascend", number, previous);
    if (number >= artifact.model.n_layer)
      fail("layer {} does not exist in a model of {} layers", number, artifact.model.n_layer);
    previous = number;
    try {
      check_layer(layer, artifact.recipe);
    } catch (const Error& error) {
      fail("layer {}: {}", number, error.what());
    }
  }
}

}  // namespace oscar

// The calibration artifact: everything a host needs to run OSCAR on one model, in one safetensors file.
//
// Tensors (F32), for each calibrated layer N (the model's number), Hk = n_head_kv or 1 when shared by the layer:
//   layers.N.k_rotation [Hk, D, D]   layers.N.v_rotation [Hk, Dv, Dv]    columns = new basis (x * R)
//   layers.N.k_eigenvalues [Hk, D]   layers.N.v_eigenvalues [Hk, Dv]     ascending; optional
//   layers.N.k_mean_pre_rope [Hkv, D] layers.N.k_mean [Hkv, D] layers.N.v_mean [Hkv, Dv]
//   layers.N.clip_k [Hk] layers.N.clip_v [Hk]
// and for the spectral codec (codec/spectral.h, the fit in src/artifact/fit_spectral.h), all or none:
//   layers.N.spectral.transform, inverse [Hkv, D, D]   layers.N.spectral.mean, inverse_sigma [Hkv, D]
//   layers.N.spectral.step [4, Hkv, D]    at widths 2, 4, 6, 8
//   layers.N.spectral.width [4, Hkv, D]   at rates 1.5, 2, 2.5, 3 bits; 0, 2, 4, 6 or 8
//   layers.N.spectral.v_signs [Hkv, Dv]   layers.N.spectral.v_scale [Hkv]
// `__metadata__` holds one key "oscar" with the JSON text of: format "oscar-artifact", format_version 2, digest, tool
// {name, version}, date, model {fingerprint, architecture, name, n_layer}, recipe (see Recipe), layers [LayerShape],
// provenance {sources [{name, sha256, tokens}], tokens, fit_revision, ...free keys...}.
// digest = SHA-256 over the metadata JSON (keys sorted, without "digest") followed by every tensor's name and bytes in name
// order; verified on load. The recipe has layer_bits (text, codec/rates.h) only where layers deviate. Version 1 had no spectral
// tensors and no k_bits and v_bits in the recipe; it is still read.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/codec.h"
#include "oscar/codec/rates.h"
#include "oscar/method/moments.h"

namespace oscar {

inline constexpr int kArtifactVersion = 2;
// Changes with anything that makes another artifact of the same moments; in provenance as "fit_revision".
inline constexpr int kFitRevision = 2;

enum class MeanMode { none, statical, rope };  // "none", "static", "rope"
MeanMode parse_mean_mode(std::string_view text);
std::string_view to_string(MeanMode mode);

// How rows are coded; the user may override single fields (CLI beats environment beats artifact).
struct Recipe {
  std::string codec = "int2";          // or spectral; at run time, never in a file, also sim:NAME (rivals/rivals.h)
  double k_bits = 2, v_bits = 2;       // spectral: one of kSpectralRates
  std::vector<LayerRates> layer_bits;  // spectral: layers with other rates, see set_rates()
  MeanMode k_mean = MeanMode::rope;
  MeanMode v_mean = MeanMode::none;         // none | static
  std::string k_objective = "qqt_r_h_pbr";  // "<moment>_<composition>": qqt, sst, oot (softmax-weighted), ktk, vtv, hadamard
  std::string v_objective = "sst_r_h_pbr";
  bool per_head = true;                 // one rotation per KV head, or one per layer
  int group_size = 0;                   // 0: head_dim
  std::optional<float> clip_k, clip_v;  // given: replaces the fitted thresholds

  [[nodiscard]] Rates rates_of(int layer) const;
};

inline constexpr int kSpectralWidths = 4;  // 2, 4, 6, 8 bits

struct SpectralLayer {
  std::vector<MatrixF> transform, inverse;  // per KV head [D, D]
  MatrixF mean, inverse_sigma;              // [Hkv, D]
  std::vector<MatrixF> step;                // per width [Hkv, D]
  std::vector<MatrixF> width;               // per rate [Hkv, D]
  MatrixF v_signs;                          // [Hkv, Dv]
  std::vector<float> v_scale;               // [Hkv]
  [[nodiscard]] bool empty() const { return transform.empty(); }
};

struct LayerArtifact {
  LayerShape shape;
  std::vector<MatrixF> k_rotation, v_rotation;  // 1 or n_head_kv; empty for sliding-window layers (left at 16 bit)
  MatrixF k_eigenvalues, v_eigenvalues;         // may be empty
  MatrixF k_mean_pre_rope, k_mean, v_mean;      // may be empty
  std::vector<float> clip_k, clip_v;            // 1 or n_head_kv
  SpectralLayer spectral;
};

struct ModelInfo {
  std::string fingerprint, architecture, name;
  int n_layer = 0;
};

struct Artifact {
  ModelInfo model;
  Recipe recipe;
  std::vector<LayerArtifact> layers;  // ascending by layer number
  nlohmann::json provenance = nlohmann::json::object();
  std::string date, tool_version, digest;  // digest: filled by save and load

  [[nodiscard]] const LayerArtifact* find(int layer) const;
};

void save_artifact(Artifact& artifact, const std::filesystem::path& path);  // atomically
Artifact load_artifact(const std::filesystem::path& path);                  // validates everything, Error names layer and cause
void validate(const Artifact& artifact);

// What a user gives of the rates, over what the recipe says: a rate for K or V is one for all layers, `layers` replaces the
// recipe's deviating layers. Keeps layer_bits canonical: no entry says what holds for all layers anyway.
struct GivenRates {
  std::optional<double> k, v;
  std::optional<std::vector<LayerRates>> layers;
  [[nodiscard]] bool any() const { return k || v || layers; }
};
void set_rates(Recipe& recipe, const GivenRates& given);
std::string describe_rates(const Recipe& recipe);  // "K 2 bits V 2 bits, by layer 0:3,5-7:k2.5"
// Error when layer_bits names a layer that is not among `layers` (ascending, not empty) or has a sliding window.
void check_layer_bits(const Recipe& recipe, std::span<const LayerShape> layers);
void check_layer_bits(const Recipe& recipe, const Artifact& artifact);
// Rates of K and V over all coded elements, metadata not counted.
Rates mean_rates(const Artifact& artifact, const Recipe& recipe);

// Codecs of one calibrated layer under the artifact's recipe.
struct LayerCodecs {
  std::shared_ptr<const Codec> k, v;
};
LayerCodecs make_codecs(const LayerArtifact& layer, const Recipe& recipe);
// Identifies artifact and recipe inside packed state rows: equal digests mean equal codes.
std::uint64_t state_digest(const Artifact& artifact, const Recipe& recipe);

// Fit: moments -> rotations, means, clip thresholds (fitted per head on the samples unless given), Error below token_floor.
struct FitOptions {
  Recipe recipe;
  std::int64_t token_floor = 1024;
  int threads = 0;  // 0: all processors; the result does not depend on it
};
struct FitReport {  // per layer and head: what the fit expects
  struct Row {
    int layer = 0, head = 0;
    double k_error = 0, v_error = 0;  // relative: tr(C_Q E_K) / tr(C_Q C_K) and |v - v^|^2 / |v|^2 on the samples
    double mean_share = 0;            // share of K's energy in its RoPE-rotated mean
    double head_overlap = 0;          // subspace overlap of this head's top-D/4 axes with the layer's shared ones, 0..1
    float clip_k = 0, clip_v = 0;
    // Squared error at the layer's output caused by coded keys, by those of codec int2, and the output's energy; 0 where the
    // moments hold no importance statistics.
    double key_noise = 0, key_noise_int2 = 0, output_energy = 0;
    std::string flag;  // empty, or why this head is worrying
  };
  std::vector<Row> rows;
  std::vector<std::string> warnings;
  // false: keys do not survive coding. int2: some head's rounding error exceeds what tells its keys apart (k - RoPE-rotated
  // mean); spectral: some layer's key noise is too large even at the highest rate.
  bool go = true;
  // Spectral: layer_bits under which no layer's noise is high that more bits for K can help; the recipe's own when all is well.
  std::vector<LayerRates> advised_layer_bits;
  std::string verdict;  // one sentence: "go...", or "no-go..." with the layers concerned
};
Artifact fit(const ModelMoments& moments, const FitOptions& options, FitReport* report);

// Where an artifact for a model file is looked for, in order: explicit path, OSCAR_ARTIFACT, <model>.oscar.safetensors
// (with and without the .gguf suffix), <cache dir>/artifacts/<fingerprint>.oscar.safetensors. nullopt: none found.
std::optional<std::filesystem::path> find_artifact(const std::filesystem::path& model, const std::string& explicit_path,
                                                   const std::string& fingerprint);
std::filesystem::path cache_dir();  // OSCAR_CACHE_DIR or ~/.cache/oscar

}  // namespace oscar

// RotationZoo files (published OSCAR): {format_version: 1, objective, source_grouping, layers: {id: {layer_id, rotation,
// eigenvalues}}}. v1: rotation [D, D] per layer; v2: [Hkv, D, D]. Told apart by the tensor's rank. Ids int or string.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "oscar/artifact/artifact.h"

namespace oscar {

struct RotationFile {
  std::string objective;        // "qqt_r_h_pbr": "<moment>_<composition>"; the truth about K or V, whatever the file is called
  std::string source_grouping;  // "layer"
  struct Layer {
    std::vector<MatrixF> rotation;  // 1 (v1) or n_head_kv (v2)
    MatrixF eigenvalues;            // [heads, D] or empty
  };
  std::map<int, Layer> layers;
};

// Validates: layer ids, square equal sizes, finiteness, not all zero, orthogonality (<= 1e-3). Error names file and layer.
RotationFile read_rotation_file(const std::filesystem::path& path);
void write_rotation_file(const RotationFile& file, const std::filesystem::path& path);

void check_objective(const std::string& objective);     // Error naming the known words
bool is_key_objective(const std::string& objective);    // qqt, ktk
bool is_value_objective(const std::string& objective);  // sst, oot, vtv

// K and V files -> artifact without means (k_mean none) and with the published clips (0.96, 0.92; Recipe::clip_k and clip_v
// override them). Swapped files are caught by their objectives. `shapes` (from a GGUF or an artifact) is the model's geometry:
// every full-attention layer must be in both files with its head size, and the files must hold no other layer. When only one
// of the files is per head, the other's matrix is repeated for every head.
Artifact artifact_from_rotation_files(const RotationFile& k, const RotationFile& v, const std::vector<LayerShape>& shapes,
                                      const ModelInfo& model);
// K and V. The format holds rotations and eigenvalues only: means, clips and provenance stay behind.
std::pair<RotationFile, RotationFile> rotation_files_from_artifact(const Artifact& artifact);

}  // namespace oscar

// What a fitted layer loses on its samples, measured with the codecs a host will use.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "oscar/artifact/artifact.h"

namespace oscar {

struct HeadQuality {
  double k_error = 0;          // sum e C_Q e^T / sum k C_Q k^T over the samples, e = k^ - k
  double k_varying_error = 0;  // the same error over the energy of k - RoPE(mean): what tells one key from another
  double v_error = 0;          // sum |v^ - v|^2 / sum |v|^2
  double mean_share = 0;       // |RoPE(mean)|^2 / mean |k|^2
  // Squared error that key codes cause at the layer's output, and that output's energy (importance.h); 0 without importance.
  double key_noise = 0, output_energy = 0;
};
std::vector<HeadQuality> measure(const LayerArtifact& layer, const Recipe& recipe, std::span<const HeadMoments> heads);

// Share of the head's strongest D/4 axes (of q_moment) that lies in the span of the layer's strongest D/4 axes: 0..1.
std::vector<double> head_overlaps(std::span<const HeadMoments> heads, int layer);

// Rows with the key mean of the recipe's mode removed. rows: [n, D] of head `head`.
MatrixF centred_keys(const MatrixF& rows, const std::vector<std::int32_t>& positions, const LayerArtifact& layer, int head,
                     MeanMode mode);

}  // namespace oscar

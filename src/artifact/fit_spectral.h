// The fit of the `spectral` codec: per KV head a transform that whitens keys in the attention-weighted metric and orders them
// (KLT), steps, and digit widths shared out over the heads of a layer.
//
//   C = covariance of k - RoPE(mu0), positions mixed, token-weighted;  M = metric + kRidge tr(metric) / D I   (importance.h)
//   T = M^(1/2) U / s,  U = eigenvectors of M^(1/2) C M^(1/2), descending,  s = the layer's largest sigma;   z = (x - mu) T
// so that s^2 |dz|^2 is the weighted squared error of logits. cond(T) <= sqrt(1 + D / kRidge) (207 for D = 128), whatever the
// data. Steps minimise the weighted squared error of the samples, gains divided out; widths minimise its weighted sum over all
// heads of the model at a given number of digits, exactly (dynamic programming over quads, then heads). With N_l what a layer's
// keys add to its output at an equal share of digits, relative to that output, a layer weighs 1 / sqrt(N_l): what is minimised
// is, near that share, the sum of sqrt(N_l). Why the root: docs/quality.md.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "oscar/artifact/artifact.h"
#include "oscar/method/importance.h"

namespace oscar {

inline constexpr double kSpectralRidge = 3e-3;

// error[h][q][l]: of quad q of head h with l digits a coordinate, l = 0 .. 4.
using QuadErrors = std::vector<std::vector<std::vector<double>>>;

// Everything but the widths. layer.k_mean_pre_rope must be set and all heads must have their importance. Sentences about heads
// whose statistics are degenerate go to `warnings`; errors: what the layer's keys add to its output, relative to it.
SpectralLayer fit_spectral(const LayerArtifact& layer, std::span<const HeadMoments> heads, std::vector<std::string>& warnings,
                           QuadErrors& errors);
// The widths of all rates: digits go where in these layers they save most. errors: parallel to layers.
void share_widths(std::span<SpectralLayer* const> layers, std::span<const QuadErrors> errors);

// At most max_digits a coordinate. Digits per head are multiples of kSpectralSlots, their sum is `digits` (rounded down to such
// a multiple). Returns digits per coordinate [h][q], the least error.
std::vector<std::vector<int>> share_digits(const QuadErrors& error, int digits, int max_digits);

}  // namespace oscar

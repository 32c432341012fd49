// Clip thresholds fitted on sampled rows, with the codec that will code them.
#pragma once

#include <vector>

#include "oscar/base/matrix.h"

namespace oscar {

// One head's samples as the clipping step of the codec sees them.
struct ClipSamples {
  MatrixF rotated;  // [n, D]: mean removed, times R
  MatrixD metric;   // [D, D]: error of row e is e metric e^T, in the rotated basis; empty: |e|^2
};

// The ratio of the grid {off, .88 ... 1} with the least total error, each head's error taken relative to its energy (so that a
// threshold shared by heads serves all of them alike). Ties go to the weaker clipping; no samples: off.
float fit_clip(const std::vector<ClipSamples>& heads, int group_size);

}  // namespace oscar

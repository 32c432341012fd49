// From moments to rotations: what an objective minimises, per head or for the whole layer.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "objective.h"
#include "oscar/base/matrix.h"
#include "oscar/method/moments.h"

namespace oscar {

// The second moment an objective names, of one head, normalised by its weight: C_h of the published method.
// moment: qqt, ktk [D, D]; vtv, oot, sst [Dv, Dv]. Error naming the layer when nothing was collected for it.
MatrixD normalised_moment(const HeadMoments& head, std::string_view moment, int layer);

// Mean over heads of the normalised moments: the layer's own C.
MatrixD shared_moment(std::span<const HeadMoments> heads, std::string_view moment, int layer);

struct FittedRotations {
  std::vector<MatrixF> rotation;      // one per head, or one
  MatrixF eigenvalues;                // [rotations, D], ascending; ones for hadamard
  std::vector<std::string> warnings;  // degenerate statistics, one line each
};
FittedRotations fit_rotations(std::span<const HeadMoments> heads, const Objective& objective, int dim, bool per_head,
                              int layer);

}  // namespace oscar

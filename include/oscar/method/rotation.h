// Orthogonal rotations of the published method and their named compositions (arXiv 2605.17757, released code).
#pragma once

#include <string_view>
#include <vector>

#include "oscar/base/matrix.h"

namespace oscar {

// Eigenvalues ascending, eigenvectors in columns; symmetrised input, fp64. Sign fixed: the largest |entry| of each column is
// positive, so results are reproducible. Throws Error on non-finite input.
struct Eigen2 {
  VectorD values;
  MatrixD vectors;
};
Eigen2 symmetric_eigen(const MatrixD& moment);
// How many of ascending eigenvalues are more than rounding: above 1e-12 of the largest.
Eigen::Index numerical_rank(const VectorD& eigenvalues);

// Sylvester Hadamard in natural order / sqrt(D). For D that is not a power of two: block-diagonal with the largest
// power-of-two divisor (and identity if that is 1).
MatrixD hadamard(int dim);
void hadamard_in_place(float* x, int dim);  // x H

// Bit-reversal permutation matrix for ascending eigenvalues: column j of M * P is column D-1-br(j) of M. For D not a power
// of two: identity order reversed.
MatrixD bit_reversal(int dim);

enum class Composition { plain, pbr, br, br_h128, r_h, h_pbr, h_r_pbr, h_pbr_r, r_h_pbr };
Composition parse_composition(std::string_view name);  // "r_h_pbr", ...; Error lists the names
std::string_view to_string(Composition composition);

// R = eigenvectors [D, D]; product read left to right: r_h_pbr = R * H * P.
MatrixD compose(Composition composition, const MatrixD& eigenvectors);

double orthogonality_error(const MatrixF& rotation);  // max |R^T R - I|

}  // namespace oscar

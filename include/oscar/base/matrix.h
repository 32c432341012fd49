// Row-major dense matrices. Rows are vectors throughout OSCAR: a rotated row is `x * R`, the columns of R are the new basis.
#pragma once

#include <Eigen/Core>

namespace oscar {

using MatrixF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixD = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using VectorF = Eigen::Matrix<float, 1, Eigen::Dynamic, Eigen::RowMajor>;
using VectorD = Eigen::Matrix<double, 1, Eigen::Dynamic, Eigen::RowMajor>;

}  // namespace oscar

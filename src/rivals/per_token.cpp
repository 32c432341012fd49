// Methods that quantise each token's row by itself.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/method/rotation.h"
#include "rivals/grids.h"
#include "rivals/simulation.h"

namespace oscar::rival {
namespace {

constexpr int kAnyBlock = 1 << 20;  // no limit on the Hadamard's size
constexpr float kQuarotClip = 0.95F;
constexpr float kRotatekvClip = 0.8F;
constexpr int kRotatekvGroup = 128;
constexpr int kRotatekvHeads = 4;  // rotated together
constexpr int kSawBlock = 128;
constexpr int kLlamaValueBlock = 64;

int largest_power_of_two_divisor(int n) { return n & -n; }

void per_group(std::span<float> x, int group, const std::function<void(std::span<float>)>& quantize) {
  const auto size = static_cast<std::size_t>(group);
  for (std::size_t begin = 0; begin < x.size(); begin += size) quantize(x.subspan(begin, std::min(size, x.size() - begin)));
}

}  // namespace

MatrixF hadamard_blocks(int dim, int block) {
  const int size = std::min(largest_power_of_two_divisor(dim), largest_power_of_two_divisor(block));
  MatrixF h = MatrixF::Zero(dim, dim);
  const MatrixF one = hadamard(size).cast<float>();
  for (int begin = 0; begin < dim; begin += size) h.block(begin, begin, size, size) = one;
  return h;
}

Simulation per_token(int width, MatrixF rotation, std::function<void(std::span<float>)> quantize) {
  return {1, false, [width, rotation = std::move(rotation), quantize = std::move(quantize)](MatrixF& rows) {
            for (Eigen::Index t = 0; t < rows.rows(); ++t) {
              for (Eigen::Index begin = 0; begin < rows.cols(); begin += width) {
                VectorF x = rows.row(t).segment(begin, width);
                if (rotation.size() != 0) x = (x * rotation).eval();
                quantize({x.data(), static_cast<std::size_t>(width)});
                if (rotation.size() != 0) x = (x * rotation.transpose()).eval();
                rows.row(t).segment(begin, width) = x;
              }
            }
          }};
}

Simulation llama_cache(bool is_k, Shape shape, bool rotated, void (*block)(std::span<float>)) {
  const int width = shape.n_head_kv * shape.head_dim;
  if (width % kBlock != 0) fail("its rows have {} values, and llama.cpp's blocks are of {}", width, kBlock);
  // Blocks run over the whole row: they may straddle heads of an odd size.
  MatrixF rotation;
  if (rotated) {
    rotation = MatrixF::Zero(width, width);
    const MatrixF head = hadamard_blocks(shape.head_dim, is_k ? kAnyBlock : kLlamaValueBlock);
    for (int h = 0; h < shape.n_head_kv; ++h)
      rotation.block(h * shape.head_dim, h * shape.head_dim, shape.head_dim, shape.head_dim) = head;
  }
  return per_token(width, std::move(rotation), [block](std::span<float> x) { per_group(x, kBlock, block); });
}

Simulation fp8(Shape shape) {
  return per_token(shape.head_dim, {}, [](std::span<float> x) { std::transform(x.begin(), x.end(), x.begin(), e4m3); });
}

Simulation naive(Shape shape, int bits) {
  return per_token(shape.head_dim, {}, [bits](std::span<float> x) { min_max(x, bits); });
}

Simulation quarot(Shape shape) {
  return per_token(shape.head_dim, hadamard_blocks(shape.head_dim, kAnyBlock),
                   [](std::span<float> x) { min_max_zero_point(x, 2, kQuarotClip); });
}

Simulation rotatekv(bool is_k, Shape shape) {
  const auto quantize = [](std::span<float> x) {
    per_group(x, kRotatekvGroup, [](std::span<float> group) { min_max_zero_point(group, 2, kRotatekvClip); });
  };
  if (!is_k) return per_token(shape.head_dim, hadamard_blocks(shape.head_dim, kAnyBlock), quantize);
  // Heads are rotated together, but scales stay within a head.
  const int width = std::gcd(kRotatekvHeads, shape.n_head_kv) * shape.head_dim;
  Simulation s = per_token(width, hadamard_blocks(width, kAnyBlock),
                           [quantize, head = shape.head_dim](std::span<float> x) { per_group(x, head, quantize); });
  s.pre_rope = true;
  return s;
}

Simulation turboquant(bool is_k, Shape shape, int bits) {
  if (!is_k) return naive(shape, bits);
  const auto root = std::sqrt(static_cast<float>(shape.head_dim));
  return per_token(shape.head_dim, hadamard_blocks(shape.head_dim, kAnyBlock),
                   [root, levels = lloyd_max(bits)](std::span<float> x) {
                     double energy = 0.0;
                     for (const float value : x) energy += static_cast<double>(value) * static_cast<double>(value);
                     const auto norm = static_cast<float>(std::sqrt(energy));
                     if (!(norm > 0.0F)) return;  // nothing to say about the direction of nothing
                     double coded_energy = 0.0;
                     for (float& value : x) {
                       value = nearest(levels, value / norm * root);
                       coded_energy += static_cast<double>(value) * static_cast<double>(value);
                     }
                     // The stored number makes the decoded row as long as the row was.
                     const float scale = round_half(norm * root / static_cast<float>(std::sqrt(coded_energy)));
                     for (float& value : x) value *= scale / root;
                   });
}

Simulation saw_int4(bool is_k, Shape shape) {
  MatrixF rotation = is_k ? hadamard_blocks(shape.head_dim, kSawBlock) : MatrixF();
  return per_token(shape.head_dim, std::move(rotation), [](std::span<float> x) { min_max(x, 4); });
}

}  // namespace oscar::rival

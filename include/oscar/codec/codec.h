// The codec seam: how one token's K (or V) row of one layer becomes bytes, and what attention needs to work on those bytes.
//
// A codec is immutable after construction and every method is safe to call from many threads. One object serves K or V of
// one layer, all KV heads. Bytes of a row are a pure function of (row, position): never of neighbours, batch or chunking.
// (Not so for simulated codecs of methods that look at several tokens: see rivals/rivals.h.)
//
// Inner basis: attention never decodes to the model's basis. Each codec has an inner basis of `head_dim` coordinates in which
//   K:  q . k^      = query_to_inner(q) . inner(k)  +  q . mean term      (mean terms: see KeyMean)
//   V:  sum p_t v^_t = inner_to_output( sum p_t inner(v_t), sum p_t )
// so a query is transformed once and an output once, and rows are only unpacked (int2: rotate; spectral: q T^-T, Hadamard).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "oscar/method/rope.h"

namespace oscar {

// Counted while encoding; summed by the cache and reported.
struct EncodeStats {
  std::uint64_t rows = 0;
  std::uint64_t saturated = 0;  // coordinates outside the code's range or clip threshold
  std::uint64_t sanitised = 0;  // rows that contained NaN or Inf; such values are replaced by 0 before coding

  EncodeStats& operator+=(const EncodeStats& o) {
    rows += o.rows;
    saturated += o.saturated;
    sanitised += o.sanitised;
    return *this;
  }
};

// What must be added to the logit of CODED rows because a mean was removed before coding. Exact rows carry no such term.
//   logit_t += scale * q . ( offset + RoPE_t(pre_rope) )
// Empty spans: no such term. Both are [head_dim] of one KV head.
struct KeyMean {
  std::span<const float> offset;
  std::span<const float> pre_rope;
  const Rope* rope = nullptr;  // non-null iff pre_rope is non-empty
  [[nodiscard]] bool empty() const { return offset.empty() && pre_rope.empty(); }
};

// Codes of one KV head as integers, for kernels that multiply codes and never decode a row:
//   x_d = gain(row) * unit_d * (c_d - centre_d),  c_d = sum over planes of field << shift
// x is in the inner basis (K), or in one of the form's bases (V, see basis_to_output).
// A plane holds `bits` bits of coordinates first .. first + count - 1: coordinate first + i in byte i / (8 / bits) from
// row[offset] on, bit fields from the lowest up. Coordinates without a plane are 0 in the inner basis.
struct CodePlane {
  std::size_t offset = 0;
  int first = 0, count = 0;  // first is a multiple of 4
  int bits = 2, shift = 0;   // 1 or 2
};
struct CodeForm {
  std::vector<CodePlane> planes;
  int coded = 0;                  // coordinates below it may have codes; K: planes start at coordinate 0
  std::vector<float> centre;      // [coded] multiples of 1/2: half of the largest code
  std::vector<float> unit;        // [coded]
  std::size_t gain_offset = 0;    // of the gain byte in a row
  std::array<float, 256> gain{};  // finite
  int bases = 1;                  // V, at most kMaxBases; a row's is told by the bits of its gain byte from basis_shift on
  int basis_shift = 8;
};
inline constexpr int kMaxBases = 4;
// Kernels may read (never use) this many bytes behind a row.
inline constexpr std::size_t kCodeSlack = 64;

class Codec {
 public:
  virtual ~Codec() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;  // "int2", "spectral", "sim:NAME"
  [[nodiscard]] virtual int n_head_kv() const = 0;
  [[nodiscard]] virtual int head_dim() const = 0;
  // Bytes of one token's row, all KV heads; constant.
  [[nodiscard]] virtual std::size_t row_bytes() const = 0;
  // Of the method, metadata included. A simulated codec stores more than its method would: row_bytes() is not the method's.
  [[nodiscard]] virtual double bits_per_element() const {
    return 8.0 * static_cast<double>(row_bytes()) / (static_cast<double>(n_head_kv()) * head_dim());
  }
  [[nodiscard]] virtual bool simulated() const { return false; }

  // row: [n_head_kv, head_dim] f32 as the host's cache would have stored it (K after RoPE). out: row_bytes().
  virtual void encode(std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
                      EncodeStats& stats) const = 0;
  // The same by several threads: the calls with part 0 .. parts - 1 together write what encode() writes, each its own bytes.
  // By default part 0 does all of it.
  virtual void encode_part(int part, int /*parts*/, std::span<const float> row, std::int64_t position,
                           std::span<std::uint8_t> out, EncodeStats& stats) const {
    if (part == 0) encode(row, position, out, stats);
  }
  // Inverse, in the model's basis with means added back. row: [n_head_kv, head_dim].
  virtual void decode(std::span<const std::uint8_t> code, std::int64_t position, std::span<float> row) const = 0;

  // Attention seam, one KV head. `code` is the whole row (row_bytes()); out: [head_dim] f32 in the inner basis.
  virtual void decode_inner(int kv_head, std::span<const std::uint8_t> code, std::span<float> out) const = 0;
  // K codecs: q [head_dim] -> inner [head_dim].
  virtual void query_to_inner(int kv_head, std::span<const float> q, std::span<float> inner) const = 0;
  // The same as a matrix M [head_dim, head_dim], row-major: inner = q M. Null: only query_to_inner.
  [[nodiscard]] virtual const float* query_matrix(int /*kv_head*/) const { return nullptr; }
  // V codecs: ADDS the model-basis value of an accumulated inner row to out; weight = sum of the probabilities of coded rows
  // (needed to add a removed mean back).
  virtual void inner_to_output(int kv_head, std::span<const float> inner, double weight, std::span<float> out) const = 0;
  // V codecs with a code form: the same of a sum of what rows of one of its bases stand for in it. ADDS to out.
  virtual void basis_to_output(int kv_head, int /*basis*/, std::span<const float> sum, std::span<float> out) const {
    inner_to_output(kv_head, sum, 0.0, out);
  }
  // Null: codes of this codec are decoded row by row.
  [[nodiscard]] virtual const CodeForm* code_form(int /*kv_head*/) const { return nullptr; }
  // K codecs: the mean terms of one KV head (empty for V).
  [[nodiscard]] virtual KeyMean key_mean(int kv_head) const = 0;
};

}  // namespace oscar

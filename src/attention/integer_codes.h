// Coded rows of one KV head attended without decoding them: codes times integer queries, integer weights times codes.
//
// A row's codes are c_d, its inner basis is gain * unit_d * (c_d - centre_d) (CodeForm). Logits: the query is rounded to
// signed bytes with one scale per row, so a logit is gain * scale * (sum of bytes * c - centre). Values: gain goes into the
// weight, weights of a tile are rounded to bytes with one scale per query row and tile, and what is accumulated is
// sum w c_d and sum w; unit and centre come in at the end (to_inner).
//
// Rows stay rows in the cache. A tile's rows are transposed while they are still packed, four bytes at a time, and taken apart
// into bytes afterwards, once for all query rows.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "attention/tile_plan.h"
#include "oscar/codec/codec.h"

namespace oscar::attention {

// Inner queries [rows][ld] as integers; out [rows][words(form)] and about [rows]. A row with NaN or Inf gets a scale of NaN.
// In word 4 (d / 16) + d % 4, byte d / 4 % 4 belongs to coordinate d: the order in which key fields are taken apart.
[[nodiscard]] constexpr int key_words(int coded) { return 4 * ((coded + 15) / 16); }
void integer_query(const CodeForm& form, const float* q, std::uint32_t* out, IntegerQuery& about);
// Where the kernels find the fields of key words.
std::vector<Kernels::KeyWord> key_word_plan(const CodeForm& form);

// Columns of a value tile: coordinate d in column (d % 4) * lanes + d / 4.
[[nodiscard]] constexpr int value_lanes(int coded) { return (coded / 4 + 15) / 16 * 16; }

// The tile of one thread; heads take turns.
class IntegerTile {
 public:
  // Rows of `cells` tokens from `row` on, `stride` bytes apart; tokens beyond get codes of nothing.
  void load_keys(const Kernels& kernels, const CodeForm& form, std::span<const Kernels::KeyWord> plan, const std::uint8_t* row,
                 std::size_t stride, int cells);
  void load_values(const Kernels& kernels, const CodeForm& form, const std::uint8_t* row, std::size_t stride, int cells);

  // s[r * kTile + j] (+)= logits, see key_scores.
  void score(const Kernels& kernels, const std::uint32_t* q, const IntegerQuery* query, int rows, bool add, float* s) const;
  // sums[r * 4 lanes + column] += weighted codes, weight[r] += weights; p [rows][kTile] >= 0.
  void add_values(const Kernels& kernels, const float* p, int rows, float* sums, double* weight, std::ptrdiff_t weight_stride);

 private:
  const std::uint8_t* whole(const std::uint8_t* row, std::size_t stride, int cells);

  std::vector<std::uint8_t> last_;  // rows of a tile that has fewer than kTile
  WordBuffer words_, aligned_;      // packed, transposed
  WordBuffer tile_;                 // K: [words][kTile]; V: [kTile / 4][4 lanes]
  alignas(64) std::array<float, kTile> gain_{};
  int n_words_ = 0, lanes_ = 0, largest_ = 0;
  std::vector<std::uint8_t> weights_;  // [rows][kTile]
  std::vector<float> scales_;          // [rows]
};

// inner [head_dim] = what the accumulated sums stand for.
void sums_to_inner(const CodeForm& form, const float* sums, double weight, int head_dim, float* inner);

}  // namespace oscar::attention

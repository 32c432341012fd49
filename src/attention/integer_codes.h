// Coded rows of one KV head attended without decoding them: codes times integer queries, integer weights times codes.
//
// A row's codes are c_d, its inner basis is gain * unit_d * (c_d - centre_d) (CodeForm). Logits: the query is rounded to
// signed bytes with one scale per row, so a logit is gain * scale * (sum of bytes * c - centre). Values: gain goes into the
// weight, weights of a tile are rounded to bytes with one scale per query row and tile, and what is accumulated is
// sum w c_d and sum w, one of each for every basis that values lie in; unit and centre come in at the end (sums_to_basis).
//
// Rows stay rows in the cache. A tile's rows are transposed while they are still packed, four bytes at a time, and taken apart
// into bytes afterwards, once for all query rows.
#pragma once

#include <array>
#include <bit>
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

// The tile of one thread; heads take turns. For few query rows codes are taken apart where they are multiplied, if the
// instruction set has registers for it, else once for all before.
class IntegerTile {
 public:
  // Rows of `cells` tokens from `row` on, `stride` bytes apart; tokens beyond get codes of nothing. `plan` is kept until
  // score().
  void load_keys(const Kernels& kernels, const CodeForm& form, std::span<const Kernels::KeyWord> plan, const std::uint8_t* row,
                 std::size_t stride, int cells);
  void load_values(const Kernels& kernels, const CodeForm& form, const std::uint8_t* row, std::size_t stride, int cells);

  // s[r * kTile + j] (+)= logits, see key_scores.
  void score(const Kernels& kernels, const std::uint32_t* q, const IntegerQuery* query, int rows, bool add, float* s);
  // Of load_values: bit b is set if some row is in basis b.
  [[nodiscard]] unsigned bases_used() const { return bases_used_; }
  [[nodiscard]] bool one_basis() const { return std::has_single_bit(bases_used_); }
  // Of the rows in basis b: sums[(r * bases + b) * 4 lanes + column] += weighted codes, weight[r * weight_stride + b] +=
  // weights; p [rows][kTile] >= 0.
  void add_values(const Kernels& kernels, const float* p, int rows, float* sums, double* weight, std::ptrdiff_t weight_stride);

  // The same in steps, for a tile of one basis: row r's p = exp(s - max) for s [kTile]. Returns the sum of p; its part of
  // `weight` [bases] is added.
  void start_weights(int rows);
  float weigh(const Kernels& kernels, int r, const float* s, float max, double* weight);
  void weigh_nothing(int r);
  void add_weighed(const Kernels& kernels, int rows, float* sums);

 private:
  const std::uint8_t* whole(const std::uint8_t* row, std::size_t stride, int cells);
  void find_bases(const CodeForm& form, const std::uint8_t* gains, std::size_t stride, std::uint32_t bits);
  void add_basis(const Kernels& kernels, int b, int rows, float* sums);

  std::vector<std::uint8_t> last_;  // rows of a tile that has fewer than kTile
  WordBuffer words_, aligned_;      // packed, transposed
  WordBuffer tile_;                 // K: [words][kTile]; V: [kTile / 4][4 lanes]
  alignas(64) std::array<float, kTile> gain_{};
  std::array<std::uint8_t, kTile> basis_{};  // V: of each row
  unsigned bases_used_ = 1;
  std::span<const Kernels::KeyWord> plan_;
  bool packed_ = false;  // V: one plane of two bits, not taken apart yet
  int n_words_ = 0, lanes_ = 0, largest_ = 0, bases_ = 1;
  std::vector<std::uint8_t> weights_;  // [rows][kTile]
  std::vector<float> scales_;          // [rows]
};

// out [head_dim] = factor times what the sums and weights of one basis stand for.
void sums_to_basis(const CodeForm& form, const float* sums, double weight, double factor, std::span<float> out);

}  // namespace oscar::attention

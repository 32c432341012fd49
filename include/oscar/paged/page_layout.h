// The layout of one layer's pages (format: page_format.h), conversion from and to the rows of the CPU codecs (bit-exact both
// ways), and what attention needs of a layer whatever its codec.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/paged/page_format.h"

namespace oscar {
class Rope;
}

namespace oscar::paged {

struct PageLayout {
  PageCodec codec = PageCodec::spectral;
  int n_head_kv = 0, head_dim = 0;
  std::vector<int> key_slots;              // [n_head_kv]
  std::vector<std::uint32_t> head_offset;  // [n_head_kv] bytes from the start of a page
  std::uint32_t page_bytes = 0;

  PageLayout() = default;
  // Of `spectral`. Throws Error on a head_dim, a number of heads or a number of slots that pages do not hold.
  PageLayout(int head_dim, std::vector<int> slots);
  // Of `int2`, one group per head. Throws likewise.
  [[nodiscard]] static PageLayout int2(int head_dim, int n_head_kv);

  [[nodiscard]] std::size_t key_row_bytes() const;  // of the CPU codec
  [[nodiscard]] std::size_t value_row_bytes() const;

  // position: in the sequence, of which the page holds number position / 64; page: page_bytes; k_row, v_row: a row of the CPU
  // codecs (`spectral`: V at 2 bits). Throws Error on sizes that differ, and on a `spectral` value whose signs are not those of
  // the position: a row that was coded elsewhere and shifted here.
  void store_rows(std::span<const std::uint8_t> k_row, std::span<const std::uint8_t> v_row, int position,
                  std::span<std::uint8_t> page) const;
  void load_rows(std::span<const std::uint8_t> page, int position, std::span<std::uint8_t> k_row,
                 std::span<std::uint8_t> v_row) const;

 private:
  void add_heads();
};

// What attention needs of one layer's coded keys besides the pages. All of it is asked of the codecs, so it holds for every
// calibration.
struct KeyTables {
  PageLayout layout;
  std::vector<MatrixF> query;  // per head [D, D]: inner query = q * query, in stored order, steps included
  std::vector<std::vector<std::uint16_t>> slot_source;  // per head [slots]: stored coordinate + 4096 * level (digit's place)
  MatrixF key_constant;                                 // [n_head_kv, D] what is added to coded keys at every position
  // RoPE means: per pair i of the layer's RoPE, angle per position, the coordinates it turns, and per head the mean as the
  // complex number (first, second), magnitude included. Empty: no head has one.
  std::vector<double> theta;
  std::vector<std::uint16_t> pair_first, pair_second;
  MatrixF mean_first, mean_second;  // [n_head_kv, n_pairs]

  // constant, pre_rope: [n_head_kv, D] or empty, as in the codecs' configurations.
  void set_means(const MatrixF& constant, const MatrixF& pre_rope, const Rope& rope);
};

// What coding keys needs of their means, in which every codec subtracts them (see encode_tables.h). Zeros where there is none.
struct KeyMeanTables {
  MatrixF offset, rest;  // [n_head_kv, D]; rest: the part of the pre-RoPE mean that no pair turns
  std::vector<double> theta;
  double magnitude = 1;
  std::vector<std::uint16_t> pair_first, pair_second;
  MatrixF mean_first, mean_second;  // [n_head_kv, n_pairs], without the magnitude

  void set_means(const MatrixF& constant, const MatrixF& pre_rope, const Rope& rope, int n_head_kv, int head_dim);
};

}  // namespace oscar::paged

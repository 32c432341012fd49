// The `spectral` codec on pages (format: page_format.h): the layout of a layer, conversion from and to the rows of the CPU
// codec (bit-exact both ways), and the static tables that device kernels read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/spectral.h"
#include "oscar/paged/page_format.h"

namespace oscar::paged {

struct PageLayout {
  int n_head_kv = 0, head_dim = 0;
  std::vector<int> key_slots;              // [n_head_kv]
  std::vector<std::uint32_t> head_offset;  // [n_head_kv] bytes from the start of a page
  std::uint32_t page_bytes = 0;

  PageLayout() = default;
  // Throws Error on a head_dim, a number of heads or a number of slots that pages do not hold.
  PageLayout(int head_dim, std::vector<int> slots);

  [[nodiscard]] std::size_t key_row_bytes() const;  // of the CPU codec
  [[nodiscard]] std::size_t value_row_bytes() const;

  // position: in the sequence, of which the page holds number position / 64; page: page_bytes; k_row, v_row: a row of the CPU
  // codecs (V at 2 bits). Throws Error on sizes that differ, and on a value whose signs are not those of the position: a row
  // that was coded elsewhere and shifted here.
  void store_rows(std::span<const std::uint8_t> k_row, std::span<const std::uint8_t> v_row, int position,
                  std::span<std::uint8_t> page) const;
  void load_rows(std::span<const std::uint8_t> page, int position, std::span<std::uint8_t> k_row,
                 std::span<std::uint8_t> v_row) const;
};

// What attention needs of one layer besides its pages. All of it is asked of the codecs, so it holds for every calibration.
struct SpectralTables {
  PageLayout layout;
  std::vector<MatrixF> query;  // per head [D, D]: inner query = q * query, in stored order, steps included
  std::vector<std::vector<std::uint16_t>> slot_source;  // per head [slots]: stored coordinate + 4096 * level (digit's place)
  MatrixF key_constant;                                 // [n_head_kv, D] what is added to coded keys at every position
  // RoPE means: per pair i of the layer's RoPE, angle per position, the coordinates it turns, and per head the mean as the
  // complex number (first, second), magnitude included. Empty: no head has one.
  std::vector<double> theta;
  std::vector<std::uint16_t> pair_first, pair_second;
  MatrixF mean_first, mean_second;  // [n_head_kv, n_pairs]
  // y^ = value_unit * 2^((n - 40) / 8) * (code - 1.5), n = gain byte mod 64, 0 where n = 0;  v^ = signs of the page's pattern *
  // (H y^), H the normalised Hadamard
  std::vector<float> value_unit;  // [n_head_kv]
  MatrixF value_signs;            // [kPatterns * n_head_kv, D], row pattern * n_head_kv + head
};

// Throws Error where the codecs do not fit pages: V not at 2 bits, or the limits of PageLayout.
SpectralTables spectral_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values);

}  // namespace oscar::paged

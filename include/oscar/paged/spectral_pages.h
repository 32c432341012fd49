// The `spectral` codec on pages (format: page_format.h): the static tables that device kernels read.
#pragma once

#include <vector>

#include "oscar/codec/spectral.h"
#include "oscar/paged/page_layout.h"

namespace oscar::paged {

struct SpectralTables : KeyTables {
  // y^ = value_unit * 2^((n - 40) / 8) * (code - 1.5), n = gain byte mod 64, 0 where n = 0;  v^ = signs of the page's pattern *
  // (H y^), H the normalised Hadamard
  std::vector<float> value_unit;  // [n_head_kv]
  MatrixF value_signs;            // [kPatterns * n_head_kv, D], row pattern * n_head_kv + head
};

// Throws Error where the codecs do not fit pages: V not at 2 bits, or the limits of PageLayout.
SpectralTables spectral_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values);

}  // namespace oscar::paged

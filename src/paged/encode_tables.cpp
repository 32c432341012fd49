#include "oscar/paged/encode_tables.h"

#include <algorithm>
#include <numeric>

#include "codec/gain.h"
#include "oscar/method/rotation.h"
#include "oscar/paged/spectral_pages.h"

namespace oscar::paged {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// Coordinates by descending width; those of equal width keep T's order.
void add_key_head(const SpectralKeyHead& head, int dim, EncodeTables& tables) {
  std::vector<int> order(size_of(dim));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return head.width[size_of(a)] > head.width[size_of(b)]; });
  MatrixF& transform = tables.transform.emplace_back(dim, dim);
  std::vector<KeyCoordinate>& coordinate = tables.coordinate.emplace_back(size_of(dim));
  int norm_count = 0;
  for (int d = 0; d < dim; ++d) {
    const int from = order[size_of(d)];
    transform.col(d) = head.transform.col(from);
    KeyCoordinate& c = coordinate[size_of(d)];
    c.inverse_sigma = head.inverse_sigma[size_of(from)];
    norm_count += static_cast<int>(c.inverse_sigma > 0.0F);
    const int width = head.width[size_of(from)];
    if (width == 0) continue;
    const float step = head.step[size_of(from)];
    c.inverse_step = 1.0F / step;
    c.weight = step * step;
    c.centre = static_cast<float>((1 << width) - 1) / 2.0F;
  }
  tables.norm_count.push_back(std::max(1, norm_count));
}

}  // namespace

EncodeTables encode_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values) {
  const SpectralTables pages = spectral_tables(keys, values);  // checks both
  EncodeTables tables;
  tables.n_head_kv = keys.n_head_kv;
  tables.head_dim = keys.head_dim;
  for (const SpectralKeyHead& head : keys.heads) add_key_head(head, keys.head_dim, tables);
  tables.set_means(keys.mean, keys.mean_pre_rope, keys.rope, keys.n_head_kv, keys.head_dim);
  tables.value_factor = static_cast<float>(hadamard(keys.head_dim)(0, 0)) * pages.value_signs;
  tables.value_scale = values.scale;
  const GaussianGrid& grid = kGaussianGrid[2];
  tables.value_inverse_step = 1.0F / grid.step;
  for (int c = 0; c < 4; ++c) tables.value_level[size_of(c)] = grid.unit() * (static_cast<float>(c) - 1.5F);
  tables.key_gain_edge = KeyGain::table().edges();
  tables.value_gain_edge = ValueGain::table().edges();
  for (std::size_t n = 0; n < tables.gain.size(); ++n) tables.gain[n] = KeyGain::table().decode(static_cast<int>(n));
  return tables;
}

}  // namespace oscar::paged

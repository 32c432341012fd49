#include "oscar/paged/spectral_pages.h"

#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"

namespace oscar::paged {
namespace {

static_assert(kPatterns == kSignPatterns && kPageTokens == kPatternPositions);
constexpr std::size_t kUnitGain = 40;  // of a value: 1

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// Number of slots of a head and the stored coordinate and level of each, from the widths in T's order.
std::vector<std::uint16_t> slots_of(std::vector<int> width) {
  std::sort(width.begin(), width.end(), std::greater<>());
  std::vector<std::uint16_t> source;
  for (int level = 0; level < kSpectralMaxWidth / 2; ++level) {
    for (std::size_t d = 0; d < width.size() && width[d] > 2 * level; ++d)
      source.push_back(static_cast<std::uint16_t>(d + 4096 * size_of(level)));
  }
  return source;
}

}  // namespace

SpectralTables spectral_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values) {
  const std::unique_ptr<Codec> key_codec = make_spectral_key_codec(keys);
  const std::unique_ptr<Codec> value_codec = make_spectral_value_codec(values);
  const int heads = keys.n_head_kv;
  const int dim = keys.head_dim;
  if (values.n_head_kv != heads || values.head_dim != dim) {
    fail("paged: keys are {} x {}, values {} x {}; pages need the same shape", heads, dim, values.n_head_kv, values.head_dim);
  }
  if (values.bits != 2) fail("paged: values of {} bits; pages hold 2", values.bits);

  SpectralTables tables;
  std::vector<int> slots;
  for (const SpectralKeyHead& head : keys.heads) {
    tables.slot_source.push_back(slots_of(head.width));
    slots.push_back(static_cast<int>(tables.slot_source.back().size()));
  }
  tables.layout = PageLayout(dim, std::move(slots));
  for (int h = 0; h < heads; ++h) {
    MatrixF& query = tables.query.emplace_back(dim, dim);
    std::vector<float> unit(size_of(dim), 0.0F);
    for (int d = 0; d < dim; ++d) {
      unit[size_of(d)] = 1.0F;
      key_codec->query_to_inner(h, unit, std::span(query.data() + d * dim, size_of(dim)));
      unit[size_of(d)] = 0.0F;
    }
  }
  tables.set_means(keys.mean, keys.mean_pre_rope, keys.rope);
  // H takes the first coordinate to equal parts of all, so its image shows the signs.
  std::vector<float> first(size_of(dim), 0.0F);
  first[0] = 1.0F;
  std::vector<float> image(size_of(dim));
  tables.value_signs.resize(kPatterns * heads, dim);
  for (int h = 0; h < heads; ++h) {
    const CodeForm& form = *value_codec->code_form(h);
    tables.value_unit.push_back(form.unit[0] * form.gain[kUnitGain]);
    for (int p = 0; p < kPatterns; ++p) {
      std::fill(image.begin(), image.end(), 0.0F);
      value_codec->basis_to_output(h, p, first, image);
      for (int d = 0; d < dim; ++d) tables.value_signs(p * heads + h, d) = std::copysign(1.0F, image[size_of(d)]);
    }
  }
  return tables;
}

}  // namespace oscar::paged

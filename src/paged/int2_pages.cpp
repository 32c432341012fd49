#include "oscar/paged/int2_pages.h"

#include <algorithm>
#include <numeric>

#include "oscar/base/error.h"

namespace oscar::paged {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

void check_fit(const Int2Config& keys, const Int2Config& values) {
  if (values.n_head_kv != keys.n_head_kv || values.head_dim != keys.head_dim) {
    fail("paged: keys are {} x {}, values {} x {}; pages need the same shape", keys.n_head_kv, keys.head_dim, values.n_head_kv,
         values.head_dim);
  }
  for (const Int2Config* side : {&keys, &values}) {
    if (side->group_size != 0 && side->group_size != side->head_dim)
      fail("paged: int2 in groups of {}; pages hold one group per head of {}", side->group_size, side->head_dim);
  }
  if (values.mean_pre_rope.size() != 0) fail("paged: int2 values have a mean before RoPE; only keys can");
}

// One per head, or none at all.
std::vector<MatrixF> per_head(const std::vector<MatrixF>& rotation, int heads) {
  return rotation.size() == 1 ? std::vector<MatrixF>(size_of(heads), rotation.front()) : rotation;
}

// As int2_clip_threshold() picks them.
std::vector<int> ranks(const std::vector<float>& clip, int heads, int dim) {
  std::vector<int> rank(size_of(heads), -1);
  for (int h = 0; h < heads && !clip.empty(); ++h) {
    const float ratio = clip[clip.size() == 1 ? 0 : size_of(h)];
    if (ratio > 0.0F) rank[size_of(h)] = std::min(static_cast<int>(ratio * static_cast<float>(dim)), dim - 1);
  }
  return rank;
}

}  // namespace

Int2Tables int2_tables(const Int2Config& keys, const Int2Config& values) {
  const std::unique_ptr<Codec> key_codec = make_int2_codec(keys);
  const std::unique_ptr<Codec> value_codec = make_int2_codec(values);
  check_fit(keys, values);
  const int heads = keys.n_head_kv;
  const int dim = keys.head_dim;
  Int2Tables tables;
  tables.layout = PageLayout::int2(dim, heads);
  std::vector<std::uint16_t> slots(size_of(dim));
  std::iota(slots.begin(), slots.end(), std::uint16_t{0});
  tables.slot_source.assign(size_of(heads), slots);
  std::vector<float> unit(size_of(dim), 0.0F);
  for (int h = 0; h < heads; ++h) {
    MatrixF& query = tables.query.emplace_back(dim, dim);
    MatrixF& output = tables.value_output.emplace_back(MatrixF::Zero(dim, dim));
    for (int d = 0; d < dim; ++d) {
      unit[size_of(d)] = 1.0F;
      key_codec->query_to_inner(h, unit, std::span(query.data() + d * dim, size_of(dim)));
      value_codec->inner_to_output(h, unit, 0.0, std::span(output.data() + d * dim, size_of(dim)));
      unit[size_of(d)] = 0.0F;
    }
  }
  tables.set_means(keys.mean_static, keys.mean_pre_rope, keys.rope);
  tables.value_mean = values.mean_static;
  return tables;
}

Int2EncodeTables int2_encode_tables(const Int2Config& keys, const Int2Config& values) {
  static_cast<void>(int2_tables(keys, values));  // checks both
  const int heads = keys.n_head_kv;
  Int2EncodeTables tables;
  tables.n_head_kv = heads;
  tables.head_dim = keys.head_dim;
  tables.set_means(keys.mean_static, keys.mean_pre_rope, keys.rope, heads, keys.head_dim);
  tables.key_rotation = per_head(keys.rotation, heads);
  tables.value_rotation = per_head(values.rotation, heads);
  tables.key_rank = ranks(keys.clip, heads, keys.head_dim);
  tables.value_rank = ranks(values.clip, heads, keys.head_dim);
  tables.value_mean = values.mean_static.size() != 0 ? values.mean_static : MatrixF(MatrixF::Zero(heads, keys.head_dim));
  return tables;
}

}  // namespace oscar::paged

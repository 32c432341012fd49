#include "oscar/paged/append_reference.h"

#include <algorithm>
#include <vector>

#include "oscar/base/half.h"

namespace oscar::paged {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

void store_exact(const AppendProblem& p, int sequence, int position, const std::uint16_t* k, const std::uint16_t* v) {
  const int heads = p.layout->n_head_kv;
  const int dim = p.layout->head_dim;
  const int length = p.lengths[sequence];
  // A row whose place in the ring a later row of the sequence takes is not copied.
  if (position >= p.sink && position / kBlockTokens <= (length - 1) / kBlockTokens - p.ring) return;
  const int columns = p.sink / kBlockTokens + p.ring;
  const std::int64_t block = p.block_table[sequence * std::ptrdiff_t{columns} + block_column(position, p.sink, p.ring)];
  if (block < 0) return;
  for (int h = 0; h < heads; ++h) {
    std::uint16_t* head = p.blocks + (static_cast<std::size_t>(block) * size_of(heads) + size_of(h)) * exact_head_values(dim);
    for (int d = 0; d < dim; ++d) {
      const std::uint32_t at = exact_index(dim, position % kBlockTokens, d);
      head[at] = k[h * dim + d];
      head[size_of(kBlockTokens * dim) + at] = v[h * dim + d];
    }
  }
}

}  // namespace

void append_reference(const AppendProblem& p) {
  const std::size_t row_values = size_of(p.layout->n_head_kv) * size_of(p.layout->head_dim);
  std::vector<float> row(row_values);
  std::vector<std::uint8_t> k_code(p.layout->key_row_bytes());
  std::vector<std::uint8_t> v_code(p.layout->value_row_bytes());
  EncodeStats stats;
  for (int b = 0; b < p.batch; ++b) {
    const int first = p.row_start != nullptr ? p.row_start[b] : b;
    const int count = p.row_start != nullptr ? p.row_start[b + 1] - first : 1;
    for (int i = 0; i < count; ++i) {
      const int position = p.lengths[b] - count + i;
      if (position < 0) continue;
      const std::uint16_t* k = p.k + size_of(first + i) * row_values;
      const std::uint16_t* v = p.v + size_of(first + i) * row_values;
      store_exact(p, b, position, k, v);
      const std::int64_t page = p.page_table[b * std::ptrdiff_t{p.page_columns} + position / kPageTokens];
      if (page < 0) continue;
      std::transform(k, k + row_values, row.begin(), half_to_float);
      p.keys->encode(row, position, k_code, stats);
      std::transform(v, v + row_values, row.begin(), half_to_float);
      p.values->encode(row, position, v_code, stats);
      p.layout->store_rows(k_code, v_code, position,
                           {p.pages + static_cast<std::size_t>(page) * p.layout->page_bytes, p.layout->page_bytes});
    }
  }
}

}  // namespace oscar::paged

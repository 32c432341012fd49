// Rows that change position (context shift) or cell (copies).
#include <algorithm>
#include <limits>

#include "cache/kv_cache_impl.h"
#include "oscar/base/error.h"

namespace oscar {

// --- shift ---------------------------------------------------------------------------------------------------------------

void KvCache::shift_layer(int layer_index, std::int64_t cell, std::int32_t delta) {
  Impl& m = *impl_;
  const std::size_t c = m.at(cell);
  const std::size_t store = m.store_index(layer_index, true);
  const RowStore& s = m.stores[store];
  const LayerSpec& layer = m.layers[static_cast<std::size_t>(layer_index)];
  // Without RoPE a row does not depend on its position.
  if (delta == 0 || !m.occupied(c) || layer.rope.params().pairing == RopePairing::none) return;
  static thread_local std::vector<float> row;
  row.resize(s.values);
  const bool exact = m.slots[c] >= 0;
  read_row(layer_index, true, cell, exact, row);
  const auto dim = static_cast<std::size_t>(layer.k_dim);
  for (std::size_t begin = 0; begin < s.values; begin += dim) layer.rope.shift(std::span(row).subspan(begin, dim), delta);
  const std::int32_t position = m.positions[c] + delta;
  if (exact) {
    m.store_row(store, c, position, row);
  } else {
    EncodeStats stats;
    s.codec->encode(row, position, m.code_row(s, c), stats);
    m.k_stats.add(stats);
  }
}

void KvCache::shift_positions(std::span<const std::int64_t> cells, std::span<const std::int32_t> deltas) {
  Impl& m = *impl_;
  if (cells.size() != deltas.size()) fail("shift: {} cells but {} deltas", cells.size(), deltas.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {  // before anything is changed
    const std::int64_t p = m.positions[m.at(cells[i])];
    if (p >= 0 && (p + deltas[i] < 0 || p + deltas[i] > kMaxPosition)) {
      fail("shift: cell {} would move from position {} by {}, outside 0..{}", cells[i], p, deltas[i], kMaxPosition);
    }
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto c = static_cast<std::size_t>(cells[i]);
    if (!m.occupied(c) || deltas[i] == 0) continue;
    if (m.positions[c] >= 0) m.positions[c] += deltas[i];
    ++m.shifted_rows;
  }
  for (auto& [seq, track] : m.tracks) track.stale = true;
  if (!m.in_epoch) m.refresh_stale();
}

void KvCache::shift(SeqId seq, std::int32_t p0, std::int32_t p1, std::int32_t delta) {
  Impl& m = *impl_;
  if (seq < 0) fail("sequence {} cannot be shifted; sequence numbers start at 0", seq);
  const auto it = m.tracks.find(seq);
  if (it == m.tracks.end() || delta == 0) return;
  if (p1 < 0) p1 = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int64_t> cells;
  std::vector<std::int64_t> gone;  // moved below position 0: removed, as llama.cpp does
  it->second.cells.for_each([&](std::int64_t cell) {
    const auto c = static_cast<std::size_t>(cell);
    if (!m.in_range(c, p0, p1)) return;
    const std::int64_t moved = static_cast<std::int64_t>(m.positions[c]) + delta;
    if (moved > kMaxPosition)
      fail("shift: position {} of sequence {} by {} exceeds {}", m.positions[c], seq, delta, kMaxPosition);
    (m.positions[c] >= 0 && moved < 0 ? gone : cells).push_back(cell);
  });
  for (const std::int64_t cell : gone) m.evict(static_cast<std::size_t>(cell));
  for (int layer = 0; layer < static_cast<int>(m.layers.size()); ++layer) {
    for (const std::int64_t cell : cells) shift_layer(layer, cell, delta);
  }
  shift_positions(cells, std::vector<std::int32_t>(cells.size(), delta));
}

// --- copies --------------------------------------------------------------------------------------------------------------

void KvCache::copy_layer_rows(int layer_index, bool is_k, std::int64_t from, std::int64_t to, std::int64_t n) {
  Impl& m = *impl_;
  const std::size_t store = m.store_index(layer_index, is_k);
  if (n < 0) fail("{} cells cannot be copied", n);
  if (n == 0 || from == to) return;
  (void)m.at(from), (void)m.at(to), (void)m.at(from + n - 1), (void)m.at(to + n - 1);
  if (from < to + n && to < from + n) fail("cells {}..{} cannot be copied to {}: the ranges overlap", from, from + n - 1, to);
  const RowStore& s = m.stores[store];
  for (std::int64_t i = 0; i < n; ++i) {
    const auto a = static_cast<std::size_t>(from + i);
    const auto b = static_cast<std::size_t>(to + i);
    if (!m.occupied(a)) {
      if (m.occupied(b)) m.evict(b);
      continue;
    }
    const bool exact = m.slots[a] >= 0;
    const StateRowKind kind =
        (m.flags[a] & kPlain) != 0 ? StateRowKind::plain : (exact ? StateRowKind::exact : StateRowKind::packed);
    m.arrive(to + i, store, kind, m.positions[a]);
    if (exact) std::ranges::copy(m.exact_row(s, a), m.exact_row(s, b).begin());
    if ((m.flags[a] & kCoded) != 0) std::ranges::copy(m.code_row(s, a), m.code_row(s, b).begin());
  }
}

void KvCache::copy_cells(std::int64_t from, std::int64_t to, std::int64_t n) {
  for (int layer = 0; layer < static_cast<int>(impl_->layers.size()); ++layer) {
    copy_layer_rows(layer, true, from, to, n);
    copy_layer_rows(layer, false, from, to, n);
  }
}

}  // namespace oscar

// Rows on their way to and from a host's saved state.
#include <algorithm>

#include "cache/kv_cache_impl.h"
#include "oscar/base/error.h"

namespace oscar {

void KvCache::set_state_digest(std::uint64_t digest) { impl_->digest = digest; }

void KvCache::export_row(int layer_index, bool is_k, std::int64_t cell, std::span<std::uint16_t> out) const {
  const Impl& m = *impl_;
  const std::size_t c = m.at(cell);
  const RowStore& s = m.stores[m.store_index(layer_index, is_k)];
  if (out.size() != s.values) fail("a saved row has {} values; expected {}", out.size(), s.values);
  if (!m.occupied(c)) {
    std::ranges::fill(out, std::uint16_t{0});
    return;
  }
  impl_->exported_rows.fetch_add(1, std::memory_order_relaxed);
  if ((m.flags[c] & kPlain) != 0) {
    std::ranges::copy(m.exact_row(s, c), out.begin());
  } else if (m.slots[c] >= 0) {
    export_exact_row(m.exact_row(s, c), m.positions[c], out);
  } else if (s.codec->simulated()) {
    fail("the cache runs {}, a simulation whose rows cannot be saved; save states with another codec", s.codec->name());
  } else {
    export_coded_row(m.code_row(s, c), m.positions[c], m.digest, out);
  }
}

// Registers one row of a cell that is restored or copied row by row. The first row empties the cell; all later ones must
// agree with it.
void KvCache::Impl::arrive(std::int64_t cell, std::size_t store, StateRowKind kind, std::int32_t position) {
  const std::size_t c = at(cell);
  const std::size_t word = store / 64;
  const std::uint64_t bit = std::uint64_t{1} << (store % 64);
  auto it = arrivals.find(cell);
  if (it == arrivals.end() || (it->second.seen[word] & bit) != 0) {
    evict(c);
    positions[c] = position;
    flags[c] = kUnclaimed;
    if (kind == StateRowKind::plain) {
      flags[c] |= kPlain;
    } else if (coded) {
      flags[c] |= kCoded;
    }
    placed_in[c] = 0;
    if (kind != StateRowKind::packed) take_slot(c);
    it = arrivals
             .insert_or_assign(cell,
                               Arrival{kind, position, std::vector<std::uint64_t>((stores.size() + 63) / 64), stores.size()})
             .first;
  } else if (it->second.kind != kind || it->second.position != position) {
    evict(c);
    fail(
        "this saved state is damaged, or was changed by a program without OSCAR: the rows of cell {} disagree about their "
        "position or kind",
        cell);
  }
  it->second.seen[word] |= bit;
  if (--it->second.missing == 0) arrivals.erase(it);
}

void KvCache::import_row(int layer_index, bool is_k, std::int64_t cell, std::span<const std::uint16_t> in) {
  Impl& m = *impl_;
  const std::size_t c = m.at(cell);
  const std::size_t store = m.store_index(layer_index, is_k);
  const RowStore& s = m.stores[store];
  if (in.size() != s.values) fail("a saved row has {} values; expected {}", in.size(), s.values);
  const StateRow row = parse_state_row(in, s.code_bytes, m.digest);
  m.arrive(cell, store, row.kind, row.position);
  EncodeStats stats;
  switch (row.kind) {
    case StateRowKind::packed:
      std::ranges::copy(row.code, m.code_row(s, c).begin());
      break;
    case StateRowKind::exact:
      import_exact_row(in, m.exact_row(s, c));
      if (m.coded) m.encode_exact(store, c, row.position, stats);
      break;
    case StateRowKind::plain: {
      // Kept to the last bit, except that nothing may turn the whole answer into NaN.
      bool finite = true;
      std::ranges::transform(in, m.exact_row(s, c).begin(), [&finite](std::uint16_t h) {
        if ((h & 0x7C00U) != 0x7C00U) return h;
        finite = false;
        return std::uint16_t{0};
      });
      if (!finite) ++stats.sanitised;
      break;
    }
  }
  (is_k ? m.k_stats : m.v_stats).add(stats);
  ++m.imported_rows;
}

}  // namespace oscar

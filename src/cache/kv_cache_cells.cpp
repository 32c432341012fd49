// Which cells belong to which sequence, and which of them keep an exact row.
#include <algorithm>
#include <limits>

#include "cache/kv_cache_impl.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

// Memory behind idle slots is given back when at least kTrimSlots of them have been idle for this many epochs; at once would
// make alternating prefills and single steps pay for the same pages over and over.
constexpr int kTrimAfterEpochs = 16;
constexpr std::int64_t kTrimSlots = 64;

void check_position(std::int64_t cell, std::int32_t position) {
  if (position < 0 || position > kMaxPosition) {
    fail("cell {}: position {} is outside 0..{}", cell, position, kMaxPosition);
  }
}

}  // namespace

// --- slots ---------------------------------------------------------------------------------------------------------------

void KvCache::Impl::take_slot(std::size_t c) {
  if (slots[c] >= 0) return;
  slots[c] = pool.acquire();
  with_slot.insert(static_cast<std::int64_t>(c));
}

void KvCache::Impl::drop_slot(std::size_t c) {
  if (slots[c] < 0) return;
  pool.release(slots[c]);
  slots[c] = -1;
  with_slot.erase(static_cast<std::int64_t>(c));
}

void KvCache::Impl::trim_exact_pool() {
  if (pool.idle() < kTrimSlots) {
    epochs_idle = 0;
  } else if (++epochs_idle >= kTrimAfterEpochs) {
    for (const auto& [begin, end] : pool.forget_idle()) {
      for (RowStore& s : stores) s.exact.release(begin * 2 * s.values, end * 2 * s.values);
    }
    epochs_idle = 0;
  }
}

// Frees the exact rows that no sequence needs. A query of the epoch that ends now may stand right behind the newest position
// BEFORE the epoch, so windows are measured from there: rows that only the epoch's own tokens pushed out go next time.
void KvCache::Impl::free_slots() {
  if (coded) {
    CellSet keep;
    for (const auto& [seq, track] : tracks) {
      std::int32_t from = track.before;
      if (track.first_placed >= 0) from = std::min(from, track.first_placed);
      const std::int64_t begin = std::max(track.cells.first_word(), with_slot.first_word());
      const std::int64_t end = std::min(track.cells.end_word(), with_slot.end_word());
      for (std::int64_t w = begin; w < end; ++w) {
        const std::uint64_t candidates = track.cells.word(w) & with_slot.word(w) & ~keep.word(w);
        CellSet::for_each_bit(candidates, w, [&](std::int64_t cell) {
          if (windows.keep(positions[static_cast<std::size_t>(cell)], from)) keep.insert(cell);
        });
      }
    }
    with_slot.for_each([&](std::int64_t cell) {
      const auto c = static_cast<std::size_t>(cell);
      if (keep.contains(cell) || placed_in[c] == epoch || (flags[c] & kUnclaimed) != 0) return;
      drop_slot(c);
      if ((flags[c] & kPlain) != 0) empty_cell(c);  // it had nothing else
    });
  }
  trim_exact_pool();
}

// --- cells ---------------------------------------------------------------------------------------------------------------

void KvCache::Impl::empty_cell(std::size_t c) {
  drop_slot(c);
  positions[c] = -1;
  flags[c] = 0;
  if (!arrivals.empty()) arrivals.erase(static_cast<std::int64_t>(c));
}

void KvCache::Impl::leave_tracks(std::size_t c, std::uint64_t keep_declared) {
  if (members[c] == 0) return;
  for (auto& [seq, track] : tracks) {
    if (keep_declared != 0 && track.declared == keep_declared) {
      track.stale = true;
    } else if (track.cells.erase(static_cast<std::int64_t>(c))) {
      track.stale = true;
      --members[c];
    }
  }
}

void KvCache::Impl::evict(std::size_t c) {
  leave_tracks(c, 0);
  empty_cell(c);
}

bool KvCache::Impl::in_range(std::size_t c, std::int32_t p0, std::int32_t p1) const {
  // A cell of unknown position belongs only to ranges that leave nothing out.
  if (positions[c] < 0) return p0 <= 0 && p1 == std::numeric_limits<std::int32_t>::max();
  return positions[c] >= p0 && positions[c] < p1;
}

// Recomputes what a track knows about its positions.
void KvCache::Impl::refresh(Track& track) const {
  track.newest = track.before = track.first_placed = -1;
  track.cells.for_each([&](std::int64_t cell) {
    const auto c = static_cast<std::size_t>(cell);
    const std::int32_t p = positions[c];
    if (p < 0) return;
    track.newest = std::max(track.newest, p);
    if (!in_epoch || placed_in[c] != epoch) {
      track.before = std::max(track.before, p);
    } else if (track.first_placed < 0 || p < track.first_placed) {
      track.first_placed = p;
    }
  });
  track.stale = false;
}

void KvCache::Impl::refresh_stale() {
  for (auto it = tracks.begin(); it != tracks.end();) {
    if (it->second.cells.empty()) {
      it = tracks.erase(it);
      continue;
    }
    if (it->second.stale) refresh(it->second);
    ++it;
  }
}

// --- epochs --------------------------------------------------------------------------------------------------------------

void KvCache::begin_epoch() {
  Impl& m = *impl_;
  if (m.in_epoch) fail("an epoch was begun inside another one");
  m.refresh_stale();
  ++m.epoch;
  m.in_epoch = true;
  for (auto& [seq, track] : m.tracks) {
    track.before = track.newest;
    track.first_placed = -1;
  }
}

void KvCache::place_cell(std::int64_t cell, std::int32_t position) {
  Impl& m = *impl_;
  const std::size_t c = m.at(cell);
  check_position(cell, position);
  if (!m.in_epoch) fail("cell {} was placed outside an epoch", cell);
  if (m.placed_in[c] == m.epoch && m.positions[c] == position) return;
  m.leave_tracks(c, m.epoch);
  if (!m.arrivals.empty()) m.arrivals.erase(cell);
  m.positions[c] = position;
  m.flags[c] = m.coded ? kCoded : 0;
  m.placed_in[c] = m.epoch;
  m.take_slot(c);
  ++m.rows_written;
}

void KvCache::set_members(SeqId seq, std::span<const std::int64_t> cells) {
  Impl& m = *impl_;
  if (seq < 0) fail("sequence {} cannot have cells; sequence numbers start at 0", seq);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::size_t c = m.at(cells[i]);
    if (i > 0 && cells[i] <= cells[i - 1]) fail("the cells of sequence {} are not ascending", seq);
    if ((m.flags[c] & kUnclaimed) != 0) {
      if (const auto it = m.arrivals.find(cells[i]); it != m.arrivals.end()) {
        const std::size_t missing = it->second.missing;
        m.evict(c);
        fail("cell {} was restored only partly: {} of its {} rows are missing from the saved state", cells[i], missing,
             m.stores.size());
      }
    }
  }
  Track& track = m.tracks[seq];
  CellSet now;
  for (const std::int64_t cell : cells) {
    const auto c = static_cast<std::size_t>(cell);
    now.insert(cell);
    m.flags[c] &= static_cast<std::uint8_t>(~kUnclaimed);
    if (!track.cells.contains(cell)) ++m.members[c];
  }
  track.cells.for_each([&](std::int64_t cell) {
    if (!now.contains(cell)) --m.members[static_cast<std::size_t>(cell)];
  });
  track.cells = std::move(now);
  track.stale = true;
  if (m.in_epoch) {
    track.declared = m.epoch;
  } else {
    m.refresh_stale();
  }
}

void KvCache::end_epoch() {
  Impl& m = *impl_;
  if (!m.in_epoch) fail("an epoch was ended that had not begun");
  m.refresh_stale();
  m.free_slots();
  m.in_epoch = false;
}

void KvCache::place(std::span<const std::int64_t> cells, std::span<const std::int32_t> positions, std::span<const SeqId> seqs) {
  Impl& m = *impl_;
  if (cells.size() != positions.size() || cells.size() != seqs.size()) {
    fail("place: {} cells, {} positions, {} sequences; there must be as many of each", cells.size(), positions.size(),
         seqs.size());
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {  // before anything is changed
    (void)m.at(cells[i]);
    check_position(cells[i], positions[i]);
    if (seqs[i] < 0) fail("place: sequence {} of cell {}; sequence numbers start at 0", seqs[i], cells[i]);
  }
  begin_epoch();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    place_cell(cells[i], positions[i]);
    Track& track = m.tracks[seqs[i]];
    if (!track.cells.insert(cells[i])) continue;
    ++m.members[static_cast<std::size_t>(cells[i])];
    track.newest = std::max(track.newest, positions[i]);
    track.first_placed = track.first_placed < 0 ? positions[i] : std::min(track.first_placed, positions[i]);
  }
  end_epoch();
}

// --- sequences -----------------------------------------------------------------------------------------------------------

void KvCache::seq_rm(SeqId seq, std::int32_t p0, std::int32_t p1) {
  Impl& m = *impl_;
  if (p1 < 0) p1 = std::numeric_limits<std::int32_t>::max();
  if (seq < 0) {
    for (std::size_t c = 0; c < m.positions.size(); ++c) {
      if (m.occupied(c) && m.in_range(c, p0, p1)) m.evict(c);
    }
  } else if (const auto it = m.tracks.find(seq); it != m.tracks.end()) {
    Track& track = it->second;
    track.cells.for_each([&](std::int64_t cell) {
      const auto c = static_cast<std::size_t>(cell);
      if (!m.in_range(c, p0, p1)) return;
      track.cells.erase(cell);
      track.stale = true;
      if (--m.members[c] == 0) m.empty_cell(c);
    });
  }
  m.refresh_stale();
}

void KvCache::seq_cp(SeqId from, SeqId to, std::int32_t p0, std::int32_t p1) {
  Impl& m = *impl_;
  if (from < 0 || to < 0) fail("sequence {} cannot be copied to {}; sequence numbers start at 0", from, to);
  if (p1 < 0) p1 = std::numeric_limits<std::int32_t>::max();
  const auto it = m.tracks.find(from);
  if (from == to || it == m.tracks.end()) return;
  Track& target = m.tracks[to];
  it->second.cells.for_each([&](std::int64_t cell) {
    const auto c = static_cast<std::size_t>(cell);
    if (m.in_range(c, p0, p1) && target.cells.insert(cell)) ++m.members[c];
  });
  target.stale = true;
  m.refresh_stale();
}

void KvCache::clear() {
  Impl& m = *impl_;
  for (RowStore& s : m.stores) {
    s.codes.release_all();
    s.exact.release_all();
  }
  std::fill(m.positions.begin(), m.positions.end(), -1);
  std::fill(m.slots.begin(), m.slots.end(), -1);
  std::fill(m.flags.begin(), m.flags.end(), std::uint8_t{0});
  std::fill(m.members.begin(), m.members.end(), 0U);
  std::fill(m.placed_in.begin(), m.placed_in.end(), std::uint64_t{0});
  m.with_slot.clear();
  m.pool.clear();
  m.epochs_idle = 0;
  m.tracks.clear();
  m.arrivals.clear();
  m.in_epoch = false;
}

std::optional<std::int32_t> KvCache::newest(SeqId seq) const {
  const auto it = impl_->tracks.find(seq);
  if (it == impl_->tracks.end()) return std::nullopt;
  Track track = it->second;
  if (track.stale) impl_->refresh(track);
  if (track.newest < 0) return std::nullopt;
  return track.newest;
}

}  // namespace oscar

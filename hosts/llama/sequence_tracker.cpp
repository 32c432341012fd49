#include "sequence_tracker.h"

#include <algorithm>

namespace oscar::llama {
namespace {

// Tokens of one stream that no later token of the batch sees: the newest token of each sequence in the batch.
std::vector<std::int64_t> sequence_ends(const MaskView& view) {
  std::vector<std::int64_t> ends;
  const auto n = static_cast<std::int64_t>(view.cells.size());
  for (std::int64_t t = 0; t < n; ++t) {
    bool seen = false;
    for (std::int64_t later = t + 1; later < n && !seen; ++later)
      seen = view.visible(later, view.cells[static_cast<std::size_t>(t)]);
    if (!seen) ends.push_back(t);
  }
  return ends;
}

}  // namespace

SequenceTracker::Track& SequenceTracker::add(std::int64_t head, std::int32_t position) {
  SeqId id = 0;  // the lowest free one
  for (bool taken = true; taken;) {
    taken = std::any_of(tracks_.begin(), tracks_.end(), [id](const Track& t) { return t.id == id; });
    if (taken) ++id;
  }
  return tracks_.emplace_back(Track{id, head, position, batch_});
}

void SequenceTracker::overwrite(KvCache& cache, std::span<const std::int64_t> cells) {
  for (std::size_t i = 0; i < tracks_.size();) {
    if (std::find(cells.begin(), cells.end(), tracks_[i].head) != cells.end()) {
      cache.set_members(tracks_[i].id, {});
      tracks_.erase(tracks_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void SequenceTracker::assign(KvCache& cache, std::span<const MaskView> streams) {
  ++batch_;
  std::vector<std::int64_t> members;
  for (const MaskView& view : streams) {
    for (const std::int64_t end : sequence_ends(view)) {
      const auto token = static_cast<std::size_t>(end);
      Track* best = nullptr;
      for (Track& track : tracks_) {
        if (track.used == batch_ || !view.visible(end, track.head)) continue;
        if (best == nullptr || track.position > best->position) best = &track;
      }
      if (best == nullptr) best = &add(view.cells[token], view.positions[token]);
      best->head = view.cells[token];
      best->position = view.positions[token];
      best->used = batch_;
      members.clear();
      const std::uint16_t* row = view.data + end * view.token_stride;
      for (std::int64_t column = 0; column < view.n_kv; ++column) {
        if (row[column] != 0xFC00U) members.push_back(view.first_cell + column);
      }
      cache.set_members(best->id, members);
    }
  }
  drop_oldest(cache);
}

void SequenceTracker::refresh(const KvCache& cache) {
  for (Track& track : tracks_) track.position = cache.position(track.head);
}

void SequenceTracker::drop_oldest(KvCache& cache) {
  while (tracks_.size() > kMaxTracks) {
    const auto oldest =
        std::min_element(tracks_.begin(), tracks_.end(), [](const Track& a, const Track& b) { return a.used < b.used; });
    if (oldest->used == batch_) return;  // all of them are running right now
    cache.set_members(oldest->id, {});
    tracks_.erase(oldest);
  }
}

}  // namespace oscar::llama

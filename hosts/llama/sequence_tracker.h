// Which cells form a sequence, learnt from attention masks alone: no ggml interface carries sequence ids, and streams are not
// sequences (a server keeps several conversations in one unified cache).
//
// A track stands for one sequence and remembers its head, the cell of its newest token. In each batch, tokens that no later
// token of the batch sees are the ends of sequences; such an end continues the track whose head it sees with the highest
// position, or starts a new track; the cells it sees are the sequence. A track whose head cell is overwritten is dead.
// Sequences that were removed or rolled back leave tracks behind that nothing continues; the least recently used ones beyond
// kMaxTracks are dropped, which only lets their 16-bit copies go.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oscar/cache/kv_cache.h"

namespace oscar::llama {

inline constexpr std::size_t kMaxTracks = 64;

// One stream's part of an attention mask.
struct MaskView {
  const std::uint16_t* data = nullptr;  // binary16 [n_tokens, n_kv], -inf = invisible
  std::int64_t token_stride = 0;        // in elements
  std::int64_t n_kv = 0;
  std::int64_t first_cell = 0;              // column j is cell first_cell + j
  std::span<const std::int64_t> cells;      // cell of each token
  std::span<const std::int32_t> positions;  // position of each token

  [[nodiscard]] bool visible(std::int64_t token, std::int64_t cell) const {
    const std::int64_t column = cell - first_cell;
    return column >= 0 && column < n_kv && data[token * token_stride + column] != 0xFC00U;
  }
};

class SequenceTracker {
 public:
  // Cells about to be replaced: tracks with their head there die.
  void overwrite(KvCache& cache, std::span<const std::int64_t> cells);
  // Once per batch, between begin_epoch() and end_epoch(): one view per stream.
  void assign(KvCache& cache, std::span<const MaskView> streams);
  // After positions changed.
  void refresh(const KvCache& cache);
  void clear() { tracks_.clear(); }
  [[nodiscard]] std::size_t size() const { return tracks_.size(); }

 private:
  struct Track {
    SeqId id = 0;
    std::int64_t head = 0;
    std::int32_t position = 0;
    std::uint64_t used = 0;  // batch number
  };
  Track& add(std::int64_t head, std::int32_t position);
  void drop_oldest(KvCache& cache);

  std::vector<Track> tracks_;
  std::uint64_t batch_ = 0;
};

}  // namespace oscar::llama

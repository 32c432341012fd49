// State of a KvCache. The public methods are spread over kv_cache.cpp (construction, rows, counters), kv_cache_cells.cpp
// (cells, sequences, slots), kv_cache_move.cpp (shift, copies) and kv_cache_state.cpp (export, import).
#pragma once

#include <atomic>
#include <map>
#include <unordered_map>
#include <vector>

#include "cache/cell_set.h"
#include "cache/lazy_region.h"
#include "cache/slot_pool.h"
#include "oscar/cache/kv_cache.h"
#include "oscar/cache/state_row.h"

namespace oscar {

// K or V of one layer.
struct RowStore {
  const Codec* codec = nullptr;  // null: exact mode
  std::size_t values = 0;        // n_head_kv * dim
  std::size_t code_bytes = 0;    // one row
  LazyRegion codes;              // [n_cells][code_bytes], by cell
  LazyRegion exact;              // [n_cells][values] binary16, by slot
};

// What the cache knows of one sequence.
struct Track {
  CellSet cells;
  std::int32_t newest = -1;        // largest known position of its cells
  std::int32_t before = -1;        // the same without cells placed in the running epoch
  std::int32_t first_placed = -1;  // smallest position placed in the running epoch, -1: none
  std::uint64_t declared = 0;      // epoch in which set_members() named its cells
  bool stale = false;              // newest and before must be recomputed
};

// A cell whose rows are arriving one by one from a saved state or from another cell.
struct Arrival {
  StateRowKind kind = StateRowKind::plain;
  std::int32_t position = -1;
  std::vector<std::uint64_t> seen;  // bit = row store
  std::size_t missing = 0;
};

struct AtomicStats {
  std::atomic<std::uint64_t> rows{0}, saturated{0}, sanitised{0};
  void add(const EncodeStats& s) {
    rows.fetch_add(s.rows, std::memory_order_relaxed);
    if (s.saturated != 0) saturated.fetch_add(s.saturated, std::memory_order_relaxed);
    if (s.sanitised != 0) sanitised.fetch_add(s.sanitised, std::memory_order_relaxed);
  }
  [[nodiscard]] EncodeStats get() const { return {rows, saturated, sanitised}; }
};

enum CellFlag : std::uint8_t {
  kCoded = 1,      // its rows have codes
  kPlain = 2,      // written by a program without OSCAR: position unknown, never coded
  kUnclaimed = 4,  // imported or copied, waiting for a sequence to claim it
};

struct KvCache::Impl {
  std::int64_t n_cells = 0;
  Windows windows;
  std::vector<LayerSpec> layers;
  std::vector<RowStore> stores;  // 2 * layer_index + (is_k ? 0 : 1)
  bool coded = false;
  std::uint64_t digest = 0;

  std::vector<std::int32_t> positions;   // [n_cells] -1: empty or unknown
  std::vector<std::int32_t> slots;       // [n_cells] -1: no exact row
  std::vector<std::uint8_t> flags;       // [n_cells] CellFlag bits
  std::vector<std::uint32_t> members;    // [n_cells] sequences that hold the cell
  std::vector<std::uint64_t> placed_in;  // [n_cells] epoch
  CellSet with_slot;                     // cells that have an exact row
  SlotPool pool;
  int epochs_idle = 0;  // epochs in a row with many idle slots
  std::uint64_t epoch = 0;
  bool in_epoch = false;
  std::map<SeqId, Track> tracks;
  std::unordered_map<std::int64_t, Arrival> arrivals;

  AtomicStats k_stats, v_stats;
  std::uint64_t rows_written = 0, shifted_rows = 0, imported_rows = 0;
  std::atomic<std::uint64_t> window_misses{0}, exported_rows{0};

  // --- access; every index is checked once here
  [[nodiscard]] std::size_t at(std::int64_t cell) const;  // Error when out of range
  [[nodiscard]] std::size_t store_index(int layer_index, bool is_k) const;
  [[nodiscard]] bool occupied(std::size_t c) const { return positions[c] >= 0 || (flags[c] & kPlain) != 0; }
  [[nodiscard]] std::span<std::uint8_t> code_row(const RowStore& s, std::size_t c) const {
    return {s.codes.data() + c * s.code_bytes, s.code_bytes};
  }
  [[nodiscard]] std::span<std::uint16_t> exact_row(const RowStore& s, std::size_t c) const;  // the cell has a slot

  // --- rows
  void write(std::size_t store, std::int64_t cell, std::span<const float> row, int part, int parts);
  // Rounds to the cell's slot, then codes the rounded row.
  void store_row(std::size_t store, std::size_t c, std::int32_t position, std::span<const float> row);
  // Codes the row that lies in the cell's slot.
  void encode_exact(std::size_t store, std::size_t c, std::int32_t position, EncodeStats& stats);

  // --- cells (kv_cache_cells.cpp)
  void take_slot(std::size_t c);
  void drop_slot(std::size_t c);
  void empty_cell(std::size_t c);                                 // no sequence holds it any more
  void leave_tracks(std::size_t c, std::uint64_t keep_declared);  // except tracks declared in that epoch (0: none kept)
  void evict(std::size_t c);                                      // leave all tracks, become empty
  [[nodiscard]] bool in_range(std::size_t c, std::int32_t p0, std::int32_t p1) const;
  void refresh(Track& track) const;
  void refresh_stale();  // also forgets tracks without cells
  void free_slots();
  void trim_exact_pool();

  // --- arrivals (kv_cache_state.cpp)
  void arrive(std::int64_t cell, std::size_t store, StateRowKind kind, std::int32_t position);
};

}  // namespace oscar

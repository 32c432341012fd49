// The two-tier cache of one set of layers that share cells (one llama.cpp KV buffer, one paged pool, ...).
//
// A cell holds one token of one or several sequences. When a row arrives, BOTH tiers are written: its code, for ever, and a
// 16-bit copy in a slot of the exact pool. Each query picks the tier by position (Windows). So codes are identical for every
// chunking and batch mix, rollback is bookkeeping, and nothing is ever moved from one tier to the other: a slot is just freed
// once no sequence that holds the cell can need it.
//
// The exact row is rounded to binary16 first and the code is computed from the ROUNDED row: a code is a pure function of the
// exact row, so saving an exact row and loading it again restores both tiers bit for bit (see state_row.h, which also
// reserves the lowest mantissa bit of the first 64 values of a row).
//
// Memory: codes and slots live in lazily mapped regions; resident bytes are O(rows used), clear() returns them to the system.
// Thread safety: methods that change cells or sequences need exclusive access; write_k/write_v may run concurrently for
// different (layer, cell); reads may run concurrently with each other.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "oscar/cache/windows.h"
#include "oscar/codec/codec.h"

namespace oscar {

using SeqId = std::int32_t;

// K and V of one layer. Null codecs = exact mode: every row keeps its 16-bit copy for ever (the base of comparisons).
struct LayerSpec {
  int layer = 0;  // the model's layer number
  int n_head_kv = 0, k_dim = 0, v_dim = 0;
  std::shared_ptr<const Codec> k, v;  // both or neither
  Rope rope;                          // K's RoPE, used by shift() ; pairing none: shift() only moves positions
};

struct MemoryUsage {
  std::size_t code_bytes = 0;   // rows that have a code * bits_per_element, all layers: the method's bytes
  std::size_t exact_bytes = 0;  // slots in use * 16-bit row bytes, all layers
  std::size_t peak_exact_bytes = 0;
  std::size_t bookkeeping_bytes = 0;  // positions, slots, membership
  std::size_t resident_bytes = 0;     // measured: pages of both pools that are in memory (mincore)
};

struct CacheCounters {
  EncodeStats k, v;
  std::uint64_t rows_written = 0;  // cells placed
  // Exact row wanted, only the code left (rolled back beyond `rollback`); counted per cell and query.
  std::uint64_t window_misses = 0;
  std::uint64_t shifted_rows = 0, imported_rows = 0, exported_rows = 0;
};

class KvCache {
 public:
  KvCache(std::int64_t n_cells, Windows windows, std::vector<LayerSpec> layers);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  [[nodiscard]] std::int64_t n_cells() const;
  [[nodiscard]] const Windows& windows() const;
  [[nodiscard]] std::span<const LayerSpec> layers() const;  // index in this span = `layer_index` below
  [[nodiscard]] bool coded() const;                         // false: exact mode

  // --- cells and sequences -------------------------------------------------------------------------------------------
  // Announces rows about to be written (one batch = one policy epoch): cell i gets position i and belongs to seq i. A cell
  // in use is simply replaced. Slots are then freed for cells that no sequence needs any more; rows of this batch and rows
  // that any query of this batch may need are kept.
  void place(std::span<const std::int64_t> cells, std::span<const std::int32_t> positions, std::span<const SeqId> seqs);
  // place() = begin_epoch + per-row placing + end_epoch. A cell may be listed twice in one call with the same position and
  // different sequences.
  // set_members() is for hosts that only see masks: declares that `seq` consists of exactly these cells (ascending). Call it
  // between begin_epoch() and end_epoch(), before or after place_cell(). It also claims imported and copied cells, and throws
  // Error when rows of such a cell are missing. A sequence that is not declared again keeps its cells until others replace
  // them. A cell that no sequence holds loses its exact row but keeps position and code.
  void begin_epoch();
  void place_cell(std::int64_t cell, std::int32_t position);
  void set_members(SeqId seq, std::span<const std::int64_t> cells);
  void end_epoch();

  void seq_rm(SeqId seq, std::int32_t p0, std::int32_t p1);  // positions [p0, p1); p1 < 0: to the end; seq < 0: all
  void seq_cp(SeqId from, SeqId to, std::int32_t p0, std::int32_t p1);
  void truncate(SeqId seq, std::int32_t n) { seq_rm(seq, n, -1); }
  // Adds delta to positions [p0, p1) of a sequence and rotates their K rows (exact rows: once; codes: decode, rotate, code).
  void shift(SeqId seq, std::int32_t p0, std::int32_t p1, std::int32_t delta);
  // The same by cell, for hosts that get per-cell deltas. shift_positions() once, shift_layer() per layer (any thread split).
  void shift_layer(int layer_index, std::int64_t cell, std::int32_t delta);
  void shift_positions(std::span<const std::int64_t> cells, std::span<const std::int32_t> deltas);
  void copy_cells(std::int64_t from, std::int64_t to, std::int64_t n);  // rows and positions; membership is not copied
  void copy_layer_rows(int layer_index, bool is_k, std::int64_t from, std::int64_t to, std::int64_t n);
  void clear();

  [[nodiscard]] std::int32_t position(std::int64_t cell) const;  // -1: empty
  [[nodiscard]] bool has_exact(std::int64_t cell) const;
  [[nodiscard]] bool has_code(std::int64_t cell) const;
  [[nodiscard]] std::optional<std::int32_t> newest(SeqId seq) const;

  // --- rows ----------------------------------------------------------------------------------------------------------
  // row: [n_head_kv * dim] f32. The cell must have been placed. Rounding: round_exact_row() of state_row.h.
  // A row may be written by several threads together, each with another part of `parts`: the codec shares the work.
  void write_k(int layer_index, std::int64_t cell, std::span<const float> row, int part = 0, int parts = 1);
  void write_v(int layer_index, std::int64_t cell, std::span<const float> row, int part = 0, int parts = 1);

  // For loops over many cells, without checks; valid until the cache is destroyed. Cell c < n_cells().
  struct CellView {
    const std::int32_t* position;  // -1: empty or unknown
    const std::int32_t* slot;      // -1: no exact row
    const std::uint8_t* flags;
    [[nodiscard]] bool has_exact(std::int64_t c) const { return slot[c] >= 0; }
    [[nodiscard]] bool has_code(std::int64_t c) const { return (flags[c] & 1U) != 0; }
  };
  [[nodiscard]] CellView cells() const;
  // Code rows of all cells, [n_cells][row_bytes()], readable for kCodeSlack bytes more; rows of cells without a code hold
  // anything.
  [[nodiscard]] const std::uint8_t* code_rows(int layer_index, bool is_k) const;
  // Exact rows by slot, [n_slots][n_head_kv * dim] binary16.
  [[nodiscard]] const std::uint16_t* exact_rows(int layer_index, bool is_k) const;

  // row_bytes() of the codec, and the binary16 row; empty if the cell has none.
  [[nodiscard]] std::span<const std::uint8_t> code(int layer_index, bool is_k, std::int64_t cell) const;
  [[nodiscard]] std::span<const std::uint16_t> exact(int layer_index, bool is_k, std::int64_t cell) const;
  // f32 row in the model's basis from the given tier.
  void read_row(int layer_index, bool is_k, std::int64_t cell, bool want_exact, std::span<float> row) const;

  // --- state ---------------------------------------------------------------------------------------------------------
  // export_row throws Error for the code of a simulated codec, which is larger than a nominal row.
  // One row in the bytes of a nominal F16 row [n_head_kv * dim], format in state_row.h. import_row throws Error when the
  // row was packed by another artifact or is damaged; a plain 16-bit row without a position (written by a stock program)
  // is kept exact, has position unknown (-1) and is never coded. Rows of one cell must agree in kind and position, else Error
  // and the cell is empty. The first row that arrives for a cell (or the first repeated one) replaces its old content; the
  // cell keeps its exact row until set_members() claims it. copy_layer_rows() works the same way.
  void export_row(int layer_index, bool is_k, std::int64_t cell, std::span<std::uint16_t> out) const;
  void import_row(int layer_index, bool is_k, std::int64_t cell, std::span<const std::uint16_t> in);
  void set_state_digest(std::uint64_t digest);  // identifies the artifact inside packed rows

  [[nodiscard]] MemoryUsage memory() const;
  [[nodiscard]] CacheCounters counters() const;
  void count_window_misses(std::uint64_t n) const;  // called by attention

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oscar

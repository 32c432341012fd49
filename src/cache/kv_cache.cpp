#include "oscar/cache/kv_cache.h"
#include "base/half_rows.h"

#include <cmath>
#include <limits>

#include "cache/kv_cache_impl.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

std::span<float> scratch(std::size_t n) {
  static thread_local std::vector<float> buffer;
  if (buffer.size() < n) buffer.resize(n);
  return std::span(buffer).first(n);
}

void to_float(std::span<const std::uint16_t> half, std::span<float> out) {
  half_to_float(half.data(), half.size(), out.data());
}

void check_codec(const LayerSpec& layer, const Codec& codec, int dim, const char* what) {
  if (codec.n_head_kv() != layer.n_head_kv || codec.head_dim() != dim) {
    fail("layer {}: the {} codec is for {} KV heads of {}, the layer has {} of {}", layer.layer, what, codec.n_head_kv(),
         codec.head_dim(), layer.n_head_kv, dim);
  }
}

RowStore make_store(const LayerSpec& layer, const Codec* codec, int dim, const char* what, std::int64_t n_cells) {
  if (layer.n_head_kv <= 0 || dim <= 0) {
    fail("layer {}: {} KV heads of {} for {}; both must be positive", layer.layer, layer.n_head_kv, dim, what);
  }
  RowStore store;
  store.values = static_cast<std::size_t>(layer.n_head_kv) * static_cast<std::size_t>(dim);
  if (store.values < kMarkedValues) {
    fail("layer {}: a {} row has {} values; a saved row needs at least {}", layer.layer, what, store.values, kMarkedValues);
  }
  if (codec != nullptr) {
    check_codec(layer, *codec, dim, what);
    store.codec = codec;
    store.code_bytes = codec->row_bytes();
    // Rows of simulated codecs are never saved: export_row().
    if (!codec->simulated() && store.code_bytes + kPackedHeaderBytes > 2 * store.values) {
      fail("layer {}: {} code bytes of a {} row do not fit in its nominal 16-bit row of {} bytes when it is saved", layer.layer,
           store.code_bytes, what, 2 * store.values);
    }
  }
  const auto n = static_cast<std::size_t>(n_cells);
  if (n > std::numeric_limits<std::size_t>::max() / 4 / store.values)
    fail("layer {}: {} cells are too many", layer.layer, n_cells);
  store.codes = LazyRegion(n * store.code_bytes + (store.code_bytes > 0 ? kCodeSlack : 0));
  store.exact = LazyRegion(n * 2 * store.values);
  return store;
}

}  // namespace

KvCache::KvCache(std::int64_t n_cells, Windows windows, std::vector<LayerSpec> layers) : impl_(std::make_unique<Impl>()) {
  if (n_cells <= 0 || n_cells > std::numeric_limits<std::int32_t>::max()) {
    fail("a cache of {} cells is not possible; it must have between 1 and 2147483647", n_cells);
  }
  if (windows.sink < 0 || windows.recent < 0 || windows.rollback < 0) {
    fail("windows sink {}, recent {}, rollback {}: none may be negative", windows.sink, windows.recent, windows.rollback);
  }
  Impl& m = *impl_;
  m.n_cells = n_cells;
  m.windows = windows;
  m.layers = std::move(layers);
  if (m.layers.empty()) fail("a cache needs at least one layer");
  m.coded = m.layers.front().k != nullptr;
  for (const LayerSpec& layer : m.layers) {
    if ((layer.k != nullptr) != m.coded || (layer.v != nullptr) != m.coded) {
      fail("layer {}: either K and V of all layers have a codec, or none has", layer.layer);
    }
    m.stores.push_back(make_store(layer, layer.k.get(), layer.k_dim, "K", n_cells));
    m.stores.push_back(make_store(layer, layer.v.get(), layer.v_dim, "V", n_cells));
  }
  const auto n = static_cast<std::size_t>(n_cells);
  m.positions.assign(n, -1);
  m.slots.assign(n, -1);
  m.flags.assign(n, 0);
  m.members.assign(n, 0);
  m.placed_in.assign(n, 0);
}

KvCache::~KvCache() = default;

std::int64_t KvCache::n_cells() const { return impl_->n_cells; }
const Windows& KvCache::windows() const { return impl_->windows; }
std::span<const LayerSpec> KvCache::layers() const { return impl_->layers; }
bool KvCache::coded() const { return impl_->coded; }

std::int32_t KvCache::position(std::int64_t cell) const { return impl_->positions[impl_->at(cell)]; }
bool KvCache::has_exact(std::int64_t cell) const { return impl_->slots[impl_->at(cell)] >= 0; }
bool KvCache::has_code(std::int64_t cell) const { return (impl_->flags[impl_->at(cell)] & kCoded) != 0; }

KvCache::CellView KvCache::cells() const {
  static_assert(kCoded == 1);
  return {impl_->positions.data(), impl_->slots.data(), impl_->flags.data()};
}

const std::uint8_t* KvCache::code_rows(int layer_index, bool is_k) const {
  return impl_->stores[impl_->store_index(layer_index, is_k)].codes.data();
}

const std::uint16_t* KvCache::exact_rows(int layer_index, bool is_k) const {
  const RowStore& s = impl_->stores[impl_->store_index(layer_index, is_k)];
  return reinterpret_cast<const std::uint16_t*>(static_cast<const void*>(s.exact.data()));
}

std::size_t KvCache::Impl::at(std::int64_t cell) const {
  if (cell < 0 || cell >= n_cells) fail("cell {} is outside the cache of {} cells", cell, n_cells);
  return static_cast<std::size_t>(cell);
}

std::size_t KvCache::Impl::store_index(int layer_index, bool is_k) const {
  if (layer_index < 0 || static_cast<std::size_t>(layer_index) >= layers.size()) {
    fail("layer index {} is outside the cache of {} layers", layer_index, layers.size());
  }
  return 2 * static_cast<std::size_t>(layer_index) + (is_k ? 0 : 1);
}

std::span<std::uint16_t> KvCache::Impl::exact_row(const RowStore& s, std::size_t c) const {
  auto* base = reinterpret_cast<std::uint16_t*>(static_cast<void*>(s.exact.data()));
  return {base + static_cast<std::size_t>(slots[c]) * s.values, s.values};
}

void KvCache::Impl::encode_exact(std::size_t store, std::size_t c, std::int32_t position, EncodeStats& stats) {
  const RowStore& s = stores[store];
  const std::span<float> row = scratch(s.values);
  to_float(exact_row(s, c), row);
  s.codec->encode(row, position, code_row(s, c), stats);
}

void KvCache::Impl::store_row(std::size_t store, std::size_t c, std::int32_t position, std::span<const float> row) {
  const RowStore& s = stores[store];
  EncodeStats stats;
  round_exact_row(row, exact_row(s, c), stats);
  if (s.codec != nullptr && (flags[c] & kPlain) == 0) encode_exact(store, c, position, stats);
  (store % 2 == 0 ? k_stats : v_stats).add(stats);
}

void KvCache::Impl::write(std::size_t store, std::int64_t cell, std::span<const float> row, int part, int parts) {
  const std::size_t c = at(cell);
  const RowStore& s = stores[store];
  if (row.size() != s.values) fail("a row of {} values was written to a cache of {}-value rows", row.size(), s.values);
  if (positions[c] < 0 || slots[c] < 0) fail("cell {} was written before it was placed", cell);
  if (parts == 1) {
    store_row(store, c, positions[c], row);
    return;
  }
  // Every part rounds the whole row, which is quick, into memory of its own; the first one's is the cell's.
  static thread_local std::vector<std::uint16_t> other;
  other.resize(s.values);
  const std::span<std::uint16_t> half = (part == 0) ? exact_row(s, c) : std::span(other);
  EncodeStats stats;
  EncodeStats counted_by_part_0;
  round_exact_row(row, half, part == 0 ? stats : counted_by_part_0);
  if (s.codec != nullptr && (flags[c] & kPlain) == 0) {
    const std::span<float> rounded = scratch(s.values);
    to_float(half, rounded);
    s.codec->encode_part(part, parts, rounded, positions[c], code_row(s, c), stats);
  }
  (store % 2 == 0 ? k_stats : v_stats).add(stats);
}

void KvCache::write_k(int layer_index, std::int64_t cell, std::span<const float> row, int part, int parts) {
  impl_->write(impl_->store_index(layer_index, true), cell, row, part, parts);
}
void KvCache::write_v(int layer_index, std::int64_t cell, std::span<const float> row, int part, int parts) {
  impl_->write(impl_->store_index(layer_index, false), cell, row, part, parts);
}

std::span<const std::uint8_t> KvCache::code(int layer_index, bool is_k, std::int64_t cell) const {
  const std::size_t c = impl_->at(cell);
  if ((impl_->flags[c] & kCoded) == 0) return {};
  return impl_->code_row(impl_->stores[impl_->store_index(layer_index, is_k)], c);
}

std::span<const std::uint16_t> KvCache::exact(int layer_index, bool is_k, std::int64_t cell) const {
  const std::size_t c = impl_->at(cell);
  if (impl_->slots[c] < 0) return {};
  return impl_->exact_row(impl_->stores[impl_->store_index(layer_index, is_k)], c);
}

void KvCache::read_row(int layer_index, bool is_k, std::int64_t cell, bool want_exact, std::span<float> row) const {
  const Impl& m = *impl_;
  const std::size_t c = m.at(cell);
  const RowStore& s = m.stores[m.store_index(layer_index, is_k)];
  if (row.size() != s.values) fail("a row of {} values was asked of a cache of {}-value rows", row.size(), s.values);
  if (want_exact) {
    if (m.slots[c] < 0) fail("cell {} has no exact row", cell);
    to_float(m.exact_row(s, c), row);
  } else {
    if ((m.flags[c] & kCoded) == 0) fail("cell {} has no code", cell);
    s.codec->decode(m.code_row(s, c), m.positions[c], row);
  }
}

MemoryUsage KvCache::memory() const {
  const Impl& m = *impl_;
  double code_bytes = 0;
  std::size_t exact_bytes = 0;
  MemoryUsage usage;
  for (const RowStore& s : m.stores) {
    if (s.codec != nullptr) code_bytes += s.codec->bits_per_element() * static_cast<double>(s.values) / 8;
    exact_bytes += 2 * s.values;
    usage.resident_bytes += s.codes.resident_bytes() + s.exact.resident_bytes();
  }
  std::size_t coded_cells = 0;
  for (const std::uint8_t f : m.flags) coded_cells += f & kCoded;
  usage.code_bytes = static_cast<std::size_t>(std::llround(static_cast<double>(coded_cells) * code_bytes));
  usage.exact_bytes = static_cast<std::size_t>(m.pool.in_use()) * exact_bytes;
  usage.peak_exact_bytes = static_cast<std::size_t>(m.pool.peak()) * exact_bytes;
  const std::size_t per_cell =
      sizeof m.positions[0] + sizeof m.slots[0] + sizeof m.flags[0] + sizeof m.members[0] + sizeof m.placed_in[0];
  usage.bookkeeping_bytes = static_cast<std::size_t>(m.n_cells) * per_cell + m.with_slot.memory_bytes() + m.pool.memory_bytes();
  for (const auto& [seq, track] : m.tracks) usage.bookkeeping_bytes += sizeof(Track) + track.cells.memory_bytes();
  for (const auto& [cell, a] : m.arrivals) usage.bookkeeping_bytes += sizeof a + a.seen.capacity() * sizeof(std::uint64_t);
  return usage;
}

CacheCounters KvCache::counters() const {
  const Impl& m = *impl_;
  CacheCounters c;
  c.k = m.k_stats.get();
  c.v = m.v_stats.get();
  c.rows_written = m.rows_written;
  c.window_misses = m.window_misses;
  c.shifted_rows = m.shifted_rows;
  c.imported_rows = m.imported_rows;
  c.exported_rows = m.exported_rows;
  return c;
}

void KvCache::count_window_misses(std::uint64_t n) const { impl_->window_misses.fetch_add(n, std::memory_order_relaxed); }

}  // namespace oscar

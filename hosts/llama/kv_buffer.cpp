#include "kv_buffer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cache_ops.h"
#include "nominal_memory.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "report.h"

namespace oscar::llama {
namespace {

constexpr int kUbatch = 512;  // llama.cpp's default; only the announced size depends on it

// "0-4,6" for the layers given in ascending order.
std::string ranges(const std::vector<CacheLayer>& layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1].layer == layers[j].layer + 1) ++j;
    if (!text.empty()) text += ',';
    text += i == j ? fmt::format("{}", layers[i].layer) : fmt::format("{}-{}", layers[i].layer, layers[j].layer);
    i = j + 1;
  }
  return text;
}

double mib(std::size_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); }

}  // namespace

KvBuffer::KvBuffer(ggml_backend_buffer_t owner, Config configuration)
    : buffer(owner),
      original(owner->iface),
      original_type(owner->buft),
      original_context(owner->context),
      base(static_cast<std::byte*>(owner->iface.get_base(owner))),
      size(owner->size),
      config(std::move(configuration)) {
  // Recycled heap memory may already be resident; nobody has stored anything here yet.
  release_pages(base, size);
}

KvBuffer::~KvBuffer() = default;

CacheTensor* KvBuffer::find(const ggml_tensor* tensor) const {
  const ggml_tensor* root = root_of(tensor);
  if (root == nullptr) return nullptr;
  const auto found = by_data_.find(root->data);
  return found == by_data_.end() ? nullptr : found->second;
}

std::int64_t KvBuffer::n_cells() const { return tensors.empty() ? 0 : tensors.front()->kv_size * tensors.front()->n_stream; }

void KvBuffer::add(const ggml_tensor* tensor) {
  auto entry = std::make_unique<CacheTensor>();
  is_cache_name(tensor->name, &entry->is_k, &entry->layer);
  entry->name = tensor->name;
  entry->data = static_cast<std::byte*>(tensor->data);
  entry->n_embd = tensor->ne[0];
  entry->kv_size = tensor->ne[1];
  entry->n_stream = tensor->ne[2];
  entry->row_bytes = tensor->nb[1];
  if (service == Service::undecided) {
    if (tensor->type != GGML_TYPE_F16) {
      give_up(fmt::format("{} is of type {}; OSCAR codes 16-bit rows itself, so start with -ctk f16 -ctv f16", entry->name,
                          host().ggml_type_name(tensor->type)));
    } else if (!tensors.empty() && entry->kv_size * entry->n_stream != n_cells()) {
      give_up(
          fmt::format("{} has {} cells, the tensors before it {}", entry->name, entry->kv_size * entry->n_stream, n_cells()));
    }
  }
  const auto at =
      std::lower_bound(layers.begin(), layers.end(), entry->layer, [](const CacheLayer& l, int n) { return l.layer < n; });
  CacheLayer& layer = at != layers.end() && at->layer == entry->layer ? *at : *layers.insert(at, CacheLayer());
  layer.layer = entry->layer;
  (entry->is_k ? layer.k : layer.v) = entry.get();
  by_data_[tensor->data] = entry.get();
  tensors.push_back(std::move(entry));
  // Tensors are placed in order without gaps larger than the alignment: the one that ends with the buffer is the last.
  const std::size_t end = static_cast<std::size_t>(tensors.back()->data - base) + host().ggml_nbytes(tensor);
  if (end + original_type->iface.get_alignment(original_type) > size) complete();
}

void KvBuffer::add_foreign(const ggml_tensor* tensor) {
  if (service == Service::undecided)
    give_up(fmt::format("the buffer of {} also holds {}", tensors.front()->name, tensor->name));
}

void KvBuffer::complete() {
  if (complete_) return;
  complete_ = true;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].k != nullptr) layers[i].k->layer_index = static_cast<int>(i);
    if (layers[i].v != nullptr) layers[i].v->layer_index = static_cast<int>(i);
  }
  raw_.assign(static_cast<std::size_t>(n_cells()), false);
  if (service != Service::undecided) return;
  for (const CacheLayer& layer : layers) {
    if (layer.k == nullptr || layer.v == nullptr) {
      give_up(fmt::format(
          "layer {} caches no separate K and V rows (multi-head latent attention), which OSCAR does not support", layer.layer));
      return;
    }
  }
  choose();
  if (config.log >= 1) announce();
}

// What can be done with this cache, before any graph is known.
void KvBuffer::choose() {
  std::vector<CacheGeometry> geometry;
  for (const CacheLayer& layer : layers) geometry.push_back({layer.layer, layer.k->n_embd, layer.v->n_embd});
  ArtifactChoice choice = choose_artifact(config, geometry);
  if (!choice.artifact) {
    if (config.mode != Mode::exact) {
      give_up(choice.problem);
      return;
    }
    // Exact mode needs no artifact, but leaves the same layers to stock as OSCAR does, so that both compare.
    if (all_sliding(geometry)) service = Service::sliding;
    return;
  }
  const auto stays = [&](const CacheLayer& layer) {
    const LayerArtifact* a = choice.artifact->find(layer.layer);
    return a->shape.sliding_window || a->k_rotation.empty() || a->v_rotation.empty();
  };
  const auto n_sliding = std::count_if(layers.begin(), layers.end(), stays);
  if (n_sliding == static_cast<std::ptrdiff_t>(layers.size())) {
    service = Service::sliding;
    return;
  }
  if (n_sliding != 0) {
    give_up(fmt::format("{} of the {} layers in one cache have a sliding window, and OSCAR cannot mix them", n_sliding,
                        layers.size()));
    return;
  }
  artifact = choice.artifact;
  if (config.mode != Mode::oscar) return;
  try {
    recipe = effective_recipe(*artifact, config);
    for (const CacheLayer& layer : layers) codecs.push_back(make_codecs(*artifact->find(layer.layer), recipe));
  } catch (const std::exception& e) {
    codecs.clear();
    give_up(fmt::format("{}: {}", choice.path.string(), e.what()));
    return;
  }
  // llama.cpp prints the buffer's size; let it be what we shall hold at worst.
  buffer->size = std::min(size, planned_bytes());
}

std::size_t KvBuffer::planned_bytes() const {
  const auto cells = static_cast<std::size_t>(n_cells());
  const Windows& w = config.windows;
  const auto per_stream = static_cast<std::size_t>(std::int64_t{w.sink} + w.recent + w.rollback);
  const std::size_t exact = std::min(cells, per_stream * static_cast<std::size_t>(tensors.front()->n_stream) + kUbatch);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::size_t exact_row = layers[i].k->row_bytes + layers[i].v->row_bytes;
    bytes += exact * exact_row;
    if (!codecs.empty()) bytes += cells * (codecs[i].k->row_bytes() + codecs[i].v->row_bytes());
  }
  return bytes;
}

void KvBuffer::announce() const {
  if (service == Service::sliding) {
    say(1, fmt::format("{} layers ({}) have a sliding window: left to llama.cpp at 16 bit | {:.1f} MiB at {} cells",
                       layers.size(), ranges(layers), mib(size), n_cells()));
    return;
  }
  if (service != Service::undecided) return;
  if (codecs.empty()) {
    say(1, fmt::format("{} layers, exact: every row 16 bit in OSCAR's own store | {:.1f} MiB at {} cells", layers.size(),
                       mib(size), n_cells()));
    return;
  }
  const std::size_t planned = planned_bytes();
  say(1, fmt::format("{} layers, {} | sink {} recent {} | {:.1f} MiB at {} cells ({:.1f}x) | artifact sha256:{}..",
                     layers.size(), describe_codec(), config.windows.sink, config.windows.recent, mib(planned), n_cells(),
                     static_cast<double>(size) / static_cast<double>(planned), artifact->digest.substr(0, 12)));
}

std::string KvBuffer::describe_codec() const {
  const LayerCodecs& first = codecs.front();
  if (first.k->simulated()) {
    return fmt::format("{}, a simulation of K {:.4g} bits V {:.4g} bits that stores more", recipe.codec,
                       first.k->bits_per_element(), first.v->bits_per_element());
  }
  if (recipe.codec == "int2") return describe_int2();
  return fmt::format("spectral, {}", describe_rates(recipe));
}

std::string KvBuffer::describe_int2() const {
  const auto clip = [](const std::vector<float>& fitted, const std::optional<float>& given) {
    const auto percent = [](float c) {
      return c > 0 ? fmt::format(".{:02.0f}", std::min(99.0F, 100 * c)) : std::string("off");
    };
    if (given) return percent(*given);
    if (fitted.empty()) return std::string("off");
    const auto [low, high] = std::minmax_element(fitted.begin(), fitted.end());
    return *low == *high ? percent(*low) : percent(*low) + "-" + percent(*high);
  };
  std::vector<float> clip_k, clip_v;
  for (const CacheLayer& layer : layers) {
    const LayerArtifact* a = artifact->find(layer.layer);
    clip_k.insert(clip_k.end(), a->clip_k.begin(), a->clip_k.end());
    clip_v.insert(clip_v.end(), a->clip_v.begin(), a->clip_v.end());
  }
  const LayerShape& shape = artifact->find(layers.front().layer)->shape;
  const auto group = [&](int dim) { return recipe.group_size == 0 ? dim : std::min(recipe.group_size, dim); };
  return fmt::format("K int2 g{} clip {} mean {} | V int2 g{} clip {} mean {}", group(shape.k_dim), clip(clip_k, recipe.clip_k),
                     to_string(recipe.k_mean), group(shape.v_dim), clip(clip_v, recipe.clip_v), to_string(recipe.v_mean));
}

std::unique_ptr<KvCache> KvBuffer::make_cache() const {
  std::vector<LayerSpec> specs;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const CacheLayer& layer = layers[i];
    LayerSpec spec;
    spec.layer = layer.layer;
    spec.n_head_kv = layer.n_head_kv;
    spec.k_dim = layer.k_dim;
    spec.v_dim = layer.v_dim;
    if (!codecs.empty()) {
      spec.k = codecs[i].k;
      spec.v = codecs[i].v;
    }
    if (layer.rope.pairing != RopePairing::none) spec.rope = Rope(layer.rope, layer.k_dim);
    specs.push_back(std::move(spec));
  }
  return std::make_unique<KvCache>(n_cells(), config.windows, std::move(specs));
}

void KvBuffer::serve() {
  std::unique_ptr<KvCache> store;
  try {
    store = make_cache();
  } catch (const Error& e) {
    give_up(e.what());
    return;
  }
  if (artifact && !codecs.empty()) store->set_state_digest(state_digest(*artifact, recipe));
  for (const auto& tensor : tensors) {
    for (std::size_t cell = 0; cell < raw_.size(); ++cell) {
      if (!raw_[cell]) continue;
      const auto* row = reinterpret_cast<const std::uint16_t*>(tensor->data + cell * tensor->row_bytes);
      store->import_row(tensor->layer_index, tensor->is_k, static_cast<std::int64_t>(cell),
                        {row, static_cast<std::size_t>(tensor->n_embd)});
    }
  }
  cache = std::move(store);
  raw_.clear();
  service = Service::served;
  release_pages(base, size);
}

void KvBuffer::give_up(const std::string& why) {
  if (service == Service::plain) return;
  if (cache) {
    std::vector<float> row;
    for (const auto& tensor : tensors) {
      row.resize(static_cast<std::size_t>(tensor->n_embd));
      for (std::int64_t cell = 0; cell < n_cells(); ++cell) {
        if (!cache->has_exact(cell) && !cache->has_code(cell)) continue;
        cache->read_row(tensor->layer_index, tensor->is_k, cell, cache->has_exact(cell), row);
        auto* out = reinterpret_cast<std::uint16_t*>(tensor->data + static_cast<std::size_t>(cell) * tensor->row_bytes);
        std::transform(row.begin(), row.end(), out, float_to_half);
      }
    }
    cache.reset();
    tracker_.clear();
    epoch_open_ = false;
  }
  service = Service::plain;
  buffer->size = size;
  refuse(why);
}

void KvBuffer::place(std::span<const std::int64_t> cells, std::span<const std::int32_t> positions) {
  // A batch whose attention never ran (rows only stored) is joined by the next one: its rows must not lose their copies
  // before a mask has told whose they are.
  if (!epoch_open_) {
    batch_end();
    cache->begin_epoch();
  }
  epoch_open_ = true;
  batch_ended_ = false;
  tracker_.overwrite(*cache, cells);
  for (std::size_t i = 0; i < cells.size(); ++i) cache->place_cell(cells[i], positions[i]);
}

void KvBuffer::attend(std::span<const MaskView> streams) {
  if (!epoch_open_) return;
  tracker_.assign(*cache, streams);
  cache->end_epoch();
  epoch_open_ = false;
}

void KvBuffer::batch_end() {
  if (epoch_open_ || batch_ended_) return;
  cache->begin_epoch();  // an epoch without rows: what the windows of the newest position do not hold goes
  cache->end_epoch();
  batch_ended_ = true;
}

void KvBuffer::mark_raw(const ggml_tensor* set_rows) {
  const ggml_tensor* indices = set_rows->src[1];
  for (std::int64_t i = 0; i < indices->ne[0]; ++i) {
    const std::int64_t cell = row_index(indices, i);
    if (cell >= 0 && cell < n_cells()) raw_[static_cast<std::size_t>(cell)] = true;
  }
}

void KvBuffer::shift_begin(std::span<const std::int32_t> deltas, int n_layers) {
  if (shift_layers_ == 0) shift_.assign(deltas.begin(), deltas.end());
  shift_layers_ += n_layers;
}

void KvBuffer::shift_end() {
  std::vector<std::int64_t> cells;
  std::vector<std::int32_t> deltas;
  for (std::size_t cell = 0; cell < shift_.size(); ++cell) {
    const auto position = cache->position(static_cast<std::int64_t>(cell));
    if (shift_[cell] == 0 || (position >= 0 && position + shift_[cell] < 0))
      continue;  // below 0: llama.cpp has dropped the cell
    cells.push_back(static_cast<std::int64_t>(cell));
    deltas.push_back(shift_[cell]);
  }
  cache->shift_positions(cells, deltas);
  tracker_.refresh(*cache);
  shift_.clear();
  shift_layers_ = 0;
}

void KvBuffer::read(const ggml_tensor* tensor, void* out, std::size_t offset, std::size_t bytes) {
  const auto* from = static_cast<const std::byte*>(tensor->data) + offset;
  if (!cache) {
    std::memcpy(out, from, bytes);
    return;
  }
  const CacheTensor* t = find(tensor);
  std::int64_t cell = t->cell_of(from);
  if (cell < 0 || bytes % t->row_bytes != 0)
    die(fmt::format("llama.cpp reads part of a row of {}, which OSCAR cannot give", t->name));
  auto* row = static_cast<std::uint16_t*>(out);
  for (std::size_t done = 0; done < bytes; done += t->row_bytes, ++cell, row += t->n_embd) {
    cache->export_row(t->layer_index, t->is_k, cell, {row, static_cast<std::size_t>(t->n_embd)});
  }
}

void KvBuffer::write(const ggml_tensor* tensor, const void* in, std::size_t offset, std::size_t bytes) {
  complete();
  auto* to = static_cast<std::byte*>(tensor->data) + offset;
  CacheTensor* t = find(tensor);
  const bool rows = t != nullptr && t->cell_of(to) >= 0 && bytes % t->row_bytes == 0;
  if (cache && !rows) die(fmt::format("llama.cpp writes part of a row of {}, which OSCAR cannot take", tensor->name));
  if (!cache) std::memcpy(to, in, bytes);
  if (!rows || (service != Service::undecided && !cache)) return;
  const std::int64_t first = t->cell_of(to);
  const auto* row = static_cast<const std::uint16_t*>(in);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes / t->row_bytes); ++i, row += t->n_embd) {
    if (cache) {
      tracker_.overwrite(*cache, std::array{first + i});
      try {
        cache->import_row(t->layer_index, t->is_k, first + i, {row, static_cast<std::size_t>(t->n_embd)});
      } catch (const Error& e) {
        throw UnusableRow(e.what());
      }
    } else {
      raw_[static_cast<std::size_t>(first + i)] = true;
    }
  }
}

void KvBuffer::fill(const ggml_tensor* tensor, std::uint8_t value, std::size_t offset, std::size_t bytes) {
  const std::vector<std::uint8_t> data(bytes, value);
  write(tensor, data.data(), offset, bytes);
}

bool KvBuffer::copy(const ggml_tensor* source, const ggml_tensor* destination) {
  CacheTensor* from = find(source);
  CacheTensor* to = find(destination);
  if (!cache) {
    if (from == nullptr || to == nullptr) return false;
    std::memcpy(destination->data, source->data, host().ggml_nbytes(source));
    if (service == Service::undecided) {
      const std::int64_t n = static_cast<std::int64_t>(host().ggml_nbytes(source) / from->row_bytes);
      for (std::int64_t i = 0; i < n; ++i) {
        raw_[static_cast<std::size_t>(to->cell_of(destination->data) + i)] =
            raw_[static_cast<std::size_t>(from->cell_of(source->data) + i)];
      }
    }
    return true;
  }
  if (from == nullptr || from != to) return false;  // the host then reads and writes whole rows instead
  const std::int64_t first = from->cell_of(source->data);
  const std::int64_t target = to->cell_of(destination->data);
  const std::size_t bytes = host().ggml_nbytes(source);
  if (first < 0 || target < 0 || bytes % from->row_bytes != 0) return false;
  const auto n = static_cast<std::int64_t>(bytes / from->row_bytes);
  for (std::int64_t i = 0; i < n; ++i) tracker_.overwrite(*cache, std::array{target + i});
  cache->copy_layer_rows(from->layer_index, from->is_k, first, target, n);
  return true;
}

void KvBuffer::clear(std::uint8_t value) {
  complete();
  if (cache) {
    cache->clear();
    tracker_.clear();
    epoch_open_ = false;
    batch_ended_ = true;
    shift_.clear();
    shift_layers_ = 0;
  } else if (value == 0) {
    zero_fill(base, size);
  } else {
    std::memset(base, value, size);
  }
  raw_.assign(raw_.size(), false);
}

nlohmann::json KvBuffer::statistics() const {
  std::vector<int> numbers;
  std::size_t nominal = 0;
  std::int64_t elements = 0;
  for (const CacheLayer& layer : layers) numbers.push_back(layer.layer);
  for (const auto& t : tensors) {
    nominal += t->row_bytes * static_cast<std::size_t>(t->kv_size * t->n_stream);
    elements += t->n_embd;
  }
  nlohmann::json j = {{"layers", numbers},
                      {"service", service == Service::served     ? "served"
                                  : service == Service::sliding  ? "sliding_window"
                                  : service == Service::plain    ? "stock"
                                  : service == Service::delegate ? "delegate"
                                                                 : "undecided"},
                      {"mode", to_string(config.mode)},
                      {"sliding_window", service == Service::sliding},
                      {"cells", n_cells()},
                      {"streams", tensors.empty() ? 0 : tensors.front()->n_stream},
                      {"nominal_bytes", nominal},
                      {"nominal_resident_bytes", resident_bytes(base, size)}};
  if (artifact && !codecs.empty()) j["artifact"] = artifact->digest;
  std::int64_t used = 0;
  MemoryUsage m;
  CacheCounters c;
  if (cache) {
    for (std::int64_t cell = 0; cell < n_cells(); ++cell) used += cache->position(cell) >= 0 || cache->has_exact(cell) ? 1 : 0;
    m = cache->memory();
    c = cache->counters();
    j["tracks"] = tracker_.size();
  }
  j["cells_used"] = used;
  j["code_bytes"] = m.code_bytes;
  j["exact_bytes"] = m.exact_bytes;
  j["peak_exact_bytes"] = m.peak_exact_bytes;
  j["bookkeeping_bytes"] = m.bookkeeping_bytes;
  j["resident_bytes"] = m.resident_bytes;
  j["rows_written"] = c.rows_written;
  j["window_misses"] = c.window_misses;
  j["imported_rows"] = c.imported_rows;
  j["exported_rows"] = c.exported_rows;
  j["shifted_rows"] = c.shifted_rows;
  j["saturated"] = c.k.saturated + c.v.saturated;
  // Every layer codes as many rows as the others.
  std::int64_t k_elements = 0, n_k = 0;
  for (const auto& t : tensors) {
    k_elements += t->is_k ? t->n_embd : 0;
    n_k += t->is_k ? 1 : 0;
  }
  const auto values = [](std::uint64_t rows, std::int64_t all, std::int64_t n) {
    return n == 0 ? 0 : rows / static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(all);
  };
  j["coded_values"] = values(c.k.rows, k_elements, n_k) +
                      values(c.v.rows, elements - k_elements, static_cast<std::int64_t>(tensors.size()) - n_k);
  j["sanitised"] = c.k.sanitised + c.v.sanitised;
  double bits = 0;
  for (const LayerCodecs& codec : codecs) {
    for (const Codec* half : {codec.k.get(), codec.v.get()})
      bits += half->bits_per_element() * static_cast<double>(half->n_head_kv()) * half->head_dim();
  }
  j["simulated"] = !codecs.empty() && codecs.front().k->simulated();
  j["bits_per_element"] = codecs.empty() ? 16.0 : bits / static_cast<double>(elements);
  j["bits_per_element_all"] =
      used == 0
          ? nlohmann::json(nullptr)
          : nlohmann::json(8.0 * static_cast<double>(m.code_bytes + m.exact_bytes) / static_cast<double>(used * elements));
  return j;
}

}  // namespace oscar::llama

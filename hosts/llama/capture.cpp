#include "capture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "oscar/base/date.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/version.h"

namespace oscar::llama {
namespace {

constexpr std::uint64_t kRejectionsNamed = 10;  // on stderr; the rest is only counted

LayerShape shape_of(const CaptureEvent& event) {
  LayerShape shape;
  shape.layer = event.layer;
  shape.n_head = event.n_head;
  shape.n_head_kv = event.n_head_kv;
  shape.k_dim = event.k_dim;
  shape.v_dim = event.v_dim;
  // A token that does not see its whole past. Layers with a window show it once a sequence is longer than the window.
  shape.sliding_window = !event.positions.empty() && event.last_visible < event.positions.back() + 1;
  shape.rope = event.rope;
  return shape;
}

// Rows of `cells`, [n, width] binary16 -> f32.
void widen(const std::uint16_t* cache, const std::int64_t* cells, std::int64_t n, std::int64_t width,
           std::vector<float>& rows) {
  rows.resize(static_cast<std::size_t>(n * width));
  float* out = rows.data();
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t* row = cache + cells[i] * width;
    for (std::int64_t j = 0; j < width; ++j) *out++ = half_to_float(row[j]);
  }
}

const float* at(const TensorView& tensor, std::int64_t stream, std::int64_t token, int token_dim) {
  return reinterpret_cast<const float*>(static_cast<const std::byte*>(tensor.data) +
                                        static_cast<std::size_t>(stream) * tensor.nb[3] +
                                        static_cast<std::size_t>(token) * tensor.nb[token_dim]);
}

std::int64_t stride(const TensorView& tensor, int dim) { return static_cast<std::int64_t>(tensor.nb[dim] / sizeof(float)); }

// What a layer that turned out to have a window keeps of its moments: nothing.
void forget_sliding(ModelMoments& moments, int layer) {
  for (std::size_t i = 0; i < moments.shapes.size(); ++i) {
    if (moments.shapes[i].layer != layer) continue;
    moments.shapes[i].sliding_window = true;
    moments.layers[i].clear();
  }
}

}  // namespace

Capture::Capture(ModelMoments model, std::optional<ModelMoments> resume, CollectorConfig config)
    : model_(std::move(model)), base_(std::move(resume)), config_(config) {
  if (!base_) return;
  if (base_->model_fingerprint != model_.model_fingerprint) {
    fail("the moments to resume are of another model ({} {}), not of {}; start without them", base_->architecture,
         base_->model_name, model_.model_name);
  }
  resumed_sources_ = base_->sources;
}

void Capture::note_error(const std::string& sentence) {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return;
  error_ = sentence;
  fmt::print(stderr, "oscar: capture: {}\n", sentence);
}

Capture::Layer* Capture::layer_of(const CaptureEvent& event) {
  LayerShape shape = shape_of(event);
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return nullptr;
  const auto [it, added] = layers_.try_emplace(event.layer);
  Layer& layer = it->second;
  if (added) {
    layer.shape = shape;
  } else {
    // The window shows late. All threads are inside this same event, so none of them is using the collector.
    if (shape.sliding_window && !layer.shape.sliding_window) {
      layer.shape.sliding_window = true;
      layer.collector.reset();
      layer.importance.reset();
    }
    shape.sliding_window = layer.shape.sliding_window;
    if (!(shape == layer.shape)) {
      error_ = fmt::format("layer {} changed its heads or its RoPE during capture; capture with one context configuration only",
                           event.layer);
      fmt::print(stderr, "oscar: capture: {}\n", error_);
      return nullptr;
    }
  }
  if (!layer.shape.sliding_window && !layer.collector) start(layer);
  if (layer.importance) follow(layer, event);
  return &layer;
}

void Capture::start(Layer& layer) const {
  layer.collector = std::make_unique<MomentCollector>(layer.shape, config_);
  if (!no_importance_.empty()) return;
  const auto metric = output_metrics_.find(layer.shape.layer);
  layer.importance = std::make_unique<ImportanceCollector>(layer.shape, ImportanceConfig{},
                                                           metric == output_metrics_.end() ? nullptr : metric->second);
}

// Where the running sequence lies. The first thread that brings an event writes it down; its mutex is held.
void Capture::follow(Layer& layer, const CaptureEvent& event) {
  const auto known = static_cast<std::int64_t>(layer.cells.size());
  const std::int64_t first = event.positions.front();
  if (known == first + event.n_tokens) return;
  bool follows = event.n_streams == 1 && first == known;
  for (std::int64_t t = 0; t < event.n_tokens && follows; ++t)
    follows = event.positions[static_cast<std::size_t>(t)] == first + t;
  std::string why;
  if (!follows) why = "tokens do not come as one sequence after the other";
  if (event.max_bias != 0.0F) why = "attention uses ALiBi";
  if (why.empty()) {
    layer.cells.insert(layer.cells.end(), event.cells.begin(), event.cells.end());
    return;
  }
  // All threads are inside this same event, and none of them has come to the collector yet.
  layer.importance.reset();
  if (!no_importance_.empty()) return;
  no_importance_ = why;
  fmt::print(stderr, "oscar: capture: the importance of keys is not collected, so only codec int2 can be fitted: {}\n", why);
}

void Capture::collect(Layer& layer, const CaptureEvent& event, int ith, int nth) {
  thread_local std::vector<float> k_rows, v_rows;
  const std::int64_t k_width = static_cast<std::int64_t>(event.n_head_kv) * event.k_dim;
  const std::int64_t v_width = static_cast<std::int64_t>(event.n_head_kv) * event.v_dim;
  // Rounded up, so that who gets a head less of these gets one more in collect_importance().
  const int head_begin = (event.n_head_kv * ith + nth - 1) / nth;
  const int head_end = (event.n_head_kv * (ith + 1) + nth - 1) / nth;
  // Thread 0 also keeps the books, so it takes part even when there are fewer heads than threads.
  if (head_begin == head_end && ith != 0) return;
  const std::int64_t per_stream = event.n_tokens / event.n_streams;
  for (std::int64_t s = 0; s < event.n_streams; ++s) {
    for (std::int64_t t = 0; t < per_stream;) {
      const std::int64_t first = s * per_stream + t;
      const std::int32_t* positions = event.positions.data() + first;
      std::int64_t n = 1;
      while (t + n < per_stream && positions[n] == positions[n - 1] + 1 && positions[n] % kMomentBlock != 0) ++n;

      widen(event.k_cache, event.cells.data() + first, n, k_width, k_rows);
      widen(event.v_cache, event.cells.data() + first, n, v_width, v_rows);
      MomentCollector::Block block;
      block.n = n;
      block.positions = positions;
      block.q = at(event.q, s, t, 1);
      block.q_token = stride(event.q, 1);
      block.q_head = stride(event.q, 2);
      block.o = at(event.out, s, t, 2);
      block.o_token = stride(event.out, 2);
      block.o_head = stride(event.out, 1);
      block.k = k_rows.data();
      block.k_token = k_width;
      block.k_head = event.k_dim;
      block.v = v_rows.data();
      block.v_token = v_width;
      block.v_head = event.v_dim;
      // Every thread checks the whole block: the same answer everywhere, without a barrier.
      const std::string objection = layer.collector->check(block);
      if (objection.empty()) {
        if (head_begin != head_end) layer.collector->add(block, head_begin, head_end);
        if (ith == 0) blocks_.fetch_add(1, std::memory_order_relaxed);
      } else if (ith == 0 && rejected_.fetch_add(1, std::memory_order_relaxed) < kRejectionsNamed) {
        fmt::print(stderr, "oscar: capture: positions {}..{} of layer {} left out: {}\n", positions[0], positions[n - 1],
                   event.layer, objection);
      }
      t += n;
    }
  }
  if (ith == 0) layer.tokens += event.n_tokens;
}

void Capture::collect_importance(Layer& layer, const CaptureEvent& event, int ith, int nth) {
  const int head_begin = event.n_head * ith / nth;
  const int head_end = event.n_head * (ith + 1) / nth;
  const std::int64_t first = event.positions.front();
  for (std::int64_t t = 0; t < event.n_tokens;) {
    const std::int64_t boundary = ((first + t) / kMomentBlock + 1) * kMomentBlock;
    ImportanceCollector::Block block;
    block.first = first + t;
    block.n = std::min(event.n_tokens - t, boundary - block.first);
    block.q = at(event.q, 0, t, 1);
    block.q_token = stride(event.q, 1);
    block.q_head = stride(event.q, 2);
    block.o = at(event.out, 0, t, 2);
    block.o_token = stride(event.out, 2);
    block.o_head = stride(event.out, 1);
    block.k = event.k_cache;
    block.v = event.v_cache;
    block.cells = layer.cells.data();
    block.scale = event.scale;
    block.softcap = event.softcap;
    block.sinks = event.sinks;
    layer.importance->add(block, head_begin, head_end);
    t += block.n;
  }
}

void Capture::on_attention(const CaptureEvent& event, int ith, int nth) {
  try {
    if (event.n_tokens == 0) return;
    if (ith == 0 && expect_start_.exchange(false) && event.positions.front() != 0) {
      note_error(
          fmt::format("a new sequence was announced but its first token is at position {}; clear the cache between sequences",
                      event.positions.front()));
    }
    Layer* layer = layer_of(event);
    if (layer != nullptr && layer->collector) collect(*layer, event, ith, nth);
    if (layer != nullptr && layer->importance) collect_importance(*layer, event, ith, nth);
  } catch (const std::exception& e) {
    note_error(e.what());
  }
}

void Capture::set_output_metric(int layer, std::vector<float> metric) {
  const std::lock_guard lock(mutex_);
  output_metrics_[layer] = std::make_shared<const std::vector<float>>(std::move(metric));
}

void Capture::begin_sequence() {
  const std::lock_guard lock(mutex_);
  end_sequences();
  expect_start_ = true;
}

void Capture::end_sequences() {
  std::vector<Layer*> work;
  for (auto& [number, layer] : layers_) {
    layer.cells.clear();
    if (layer.importance) work.push_back(&layer);
  }
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next++; i < work.size(); i = next++) work[i]->importance->end_sequence();
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(run);
  run();
}

// The moments since the last save; the collectors are gone, and start anew with the next token.
ModelMoments Capture::take_session() {
  end_sequences();
  ModelMoments session = model_;
  session.sources.clear();
  std::int64_t seen = 0;
  for (auto& [number, layer] : layers_) {
    session.shapes.push_back(layer.shape);
    session.layers.emplace_back();
    if (!layer.shape.sliding_window) {
      if (!layer.collector) start(layer);
      session.layers.back() = layer.collector->take_heads();
      layer.collector.reset();
      if (layer.importance) {
        const auto importance = layer.importance->heads();
        for (std::size_t h = 0; h < importance.size(); ++h) session.layers.back()[h].importance = std::move(importance[h]);
      }
      layer.importance.reset();
    }
    seen = std::max(seen, layer.tokens);
    layer.tokens = 0;
  }
  tokens_ += seen;
  return session;
}

void Capture::set_sources(std::vector<TextSource> sources) {
  const std::lock_guard lock(mutex_);
  given_sources_ = std::move(sources);
}

// Sources are read in the order announced; the tokens seen so far are credited in that order.
std::vector<TextSource> Capture::credited_sources() const {
  std::vector<TextSource> sources = resumed_sources_;
  std::int64_t left = tokens_;
  for (const TextSource& planned : model_.sources) {
    const std::int64_t tokens = std::min(planned.tokens, left);
    left -= tokens;
    if (tokens == 0) continue;
    const auto same = std::find_if(sources.begin(), sources.end(),
                                   [&](const TextSource& s) { return s.name == planned.name && s.sha256 == planned.sha256; });
    if (same != sources.end()) {  // a resumed run goes on in a text that the earlier run began
      same->tokens += tokens;
    } else {
      sources.push_back({planned.name, planned.sha256, tokens});
    }
  }
  return sources;
}

void Capture::save(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) fail("{}", error_);
  ModelMoments session = take_session();
  if (tokens_ == 0) fail("no token was captured: decode text with flash attention on and a 16-bit cache first");

  if (base_) {
    for (const LayerShape& shape : session.shapes) {
      if (shape.sliding_window) forget_sliding(*base_, shape.layer);
    }
    for (const LayerShape& shape : base_->shapes) {
      if (shape.sliding_window) forget_sliding(session, shape.layer);
    }
    base_->sources.clear();
    merge(*base_, session);
  } else {
    base_ = std::move(session);
  }
  base_->sources = given_sources_ ? *given_sources_ : credited_sources();
  base_->date = utc_date();
  base_->tool_version = version();
  save_moments(*base_, path);
  if (const std::uint64_t n = rejected_; n > 0)
    fmt::print(stderr, "oscar: capture: {} of {} blocks left out (NaN or Inf)\n", n, n + blocks_);
}

}  // namespace oscar::llama

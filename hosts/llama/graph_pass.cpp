#include "graph_pass.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "report.h"
#include "rope_node.h"
#include "self_probe.h"
#include "statistics.h"

namespace oscar::llama {
namespace {

float float_param(const ggml_tensor* node, int index) {
  float value = 0;
  std::memcpy(&value, &node->op_params[index], sizeof(value));
  return value;
}

// Operations that only describe memory; the host skips them.
bool is_empty(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

// As ggml computes them for soft_max and flash attention.
std::vector<float> alibi_slopes(float max_bias, std::int64_t n_head) {
  const double power = std::exp2(std::floor(std::log2(static_cast<double>(n_head))));
  const double m0 = std::exp2(-max_bias / power);
  const double m1 = std::exp2(-(max_bias / 2.0) / power);
  std::vector<float> slopes;
  for (std::int64_t h = 0; h < n_head; ++h) {
    const auto i = static_cast<double>(h);
    slopes.push_back(static_cast<float>(i < power ? std::pow(m0, i + 1) : std::pow(m1, 2 * (i - power) + 1)));
  }
  return slopes;
}

TensorView view_of(const ggml_tensor* t) {
  TensorView v;
  if (t == nullptr) return v;
  v.data = t->data;
  std::copy_n(t->ne, 4, v.ne);
  std::copy_n(t->nb, 4, v.nb);
  return v;
}

std::int64_t stride(std::size_t bytes, std::size_t element) { return static_cast<std::int64_t>(bytes / element); }

}  // namespace

ggml_status GraphPass::compute(ggml_cgraph* graph) {
  collect(graph);
  if (touches_.empty()) return original_(backend_, graph);
  if (std::any_of(touches_.begin(), touches_.end(), [](const Touch& t) { return t.use == Use::attention; }))
    counters().graphs.fetch_add(1);

  std::vector<KvBuffer*> buffers;
  for (const Touch& t : touches_) {
    if (std::find(buffers.begin(), buffers.end(), t.buffer) == buffers.end()) buffers.push_back(t.buffer);
  }
  std::sort(buffers.begin(), buffers.end());  // one order for all threads
  std::vector<std::unique_lock<std::mutex>> locks;
  locks.reserve(buffers.size());
  for (KvBuffer* b : buffers) locks.emplace_back(b->mutex);

  patches_.clear();
  rows_.clear();
  attentions_.clear();
  shifts_.clear();
  captures_.clear();
  for (KvBuffer* b : buffers) process(*b, graph);

  const ggml_status status = original_(backend_, graph);

  for (const Patch& p : patches_) {
    p.node->op = p.op;
    p.node->flags = p.flags;
    std::memcpy(p.node->op_params, p.params, sizeof(p.params));
  }
  for (KvBuffer* b : buffers) {
    if (b->shifting() && b->shift_complete()) b->shift_end();
    if (whole_batch(*b)) b->batch_end();
  }
  if (!captures_.empty()) captures_.front().sink->on_graph_end();
  return status;
}

// Whether this one graph stored and attended in every layer. Only then no later slice can need the batch's older rows.
bool GraphPass::whole_batch(const KvBuffer& buffer) const {
  if (buffer.service != Service::served) return false;
  bool opened = false;
  bool closed = false;
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer) continue;
    opened |= t.use == Use::set_rows && t.tensor->layer_index == 0;
    closed |= t.use == Use::attention && t.tensor->layer_index + 1 == static_cast<int>(buffer.layers.size());
  }
  return opened && closed;
}

// Finds the nodes that work on caches, and the positions of the batch's tokens.
void GraphPass::collect(ggml_cgraph* graph) {
  touches_.clear();
  const int n = host().ggml_graph_n_nodes(graph);
  bool positions_known = false;
  for (int i = 0; i < n; ++i) {
    ggml_tensor* node = host().ggml_graph_node(graph, i);
    if (is_empty(node->op)) continue;
    Touch t{node, i, Use::other, nullptr, nullptr};
    const ggml_tensor* on_cache = nullptr;
    if (find_buffer(node) != nullptr) {  // writes into a cache
      on_cache = node;
      if (node->op == GGML_OP_SET_ROWS) t.use = Use::set_rows;
      if (node->op == GGML_OP_ROPE) t.use = Use::shift;
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      t.use = Use::attention;
      for (const int s : {1, 2}) {
        if (on_cache == nullptr && find_buffer(node->src[s]) != nullptr) on_cache = node->src[s];
      }
      if (on_cache == nullptr) find_unknown_caches(node);
    } else {
      for (const ggml_tensor* source : node->src) {
        if (source != nullptr && on_cache == nullptr && find_buffer(source) != nullptr) on_cache = source;
      }
      if (node->op == GGML_OP_MUL_MAT && on_cache == nullptr) find_unknown_caches(node);
    }
    if (on_cache == nullptr) {
      if (positions_known) continue;
      if (const auto found = rope_positions(node); !found.empty()) {
        positions_.assign(found.begin(), found.end());
        positions_known = true;
      }
      continue;
    }
    t.buffer = find_buffer(on_cache);
    t.tensor = t.buffer->find(on_cache);
    if (t.tensor != nullptr) touches_.push_back(t);
  }
}

// A cache that our hooks never saw (another device, another allocation path) would be served by nobody, silently.
void GraphPass::find_unknown_caches(const ggml_tensor* node) {
  for (const ggml_tensor* source : node->src) {
    const ggml_tensor* root = root_of(source);
    if (root == nullptr || !is_cache_name(root->name, nullptr, nullptr)) continue;
    if (config().mode != Mode::oscar && config().mode != Mode::exact) continue;
    counters().bypassed.fetch_add(1);
    refuse(fmt::format("attention on {} was not intercepted: its memory was not allocated by the CPU device", root->name));
    return;
  }
}

void GraphPass::process(KvBuffer& buffer, ggml_cgraph* graph) {
  buffer.complete();
  try {
    learn(buffer);
  } catch (const Error& e) {  // a RoPE that cannot be reproduced
    if (buffer.service == Service::undecided || buffer.service == Service::served) buffer.give_up(e.what());
    if (buffer.config.mode == Mode::capture) refuse(e.what());
  }
  if (buffer.service == Service::undecided) decide(buffer);
  if (buffer.service == Service::served) {
    std::string why = verify(buffer);
    if (why.empty()) why = obstacle(buffer);
    if (!why.empty()) buffer.give_up(why);
  }
  if (buffer.service == Service::served) {
    serve(buffer);
    return;
  }
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer) continue;
    const bool attention = t.use == Use::attention || (t.node->op == GGML_OP_MUL_MAT && t.tensor->is_k);
    if (t.use == Use::set_rows && t.tensor->is_k && t.tensor->layer_index == 0) {
      buffer.batch_cells.clear();
      for (std::int64_t i = 0; i < t.node->src[1]->ne[0]; ++i) buffer.batch_cells.push_back(row_index(t.node->src[1], i));
    }
    if (!attention) continue;
    switch (buffer.service) {
      case Service::sliding:
        counters().sliding.fetch_add(1);
        break;
      case Service::delegate:
        counters().delegated.fetch_add(1);
        break;
      default:
        counters().bypassed.fetch_add(1);
        break;
    }
  }
  if (buffer.service == Service::delegate && buffer.config.mode == Mode::capture) capture(buffer, graph);
}

// Head geometry and RoPE as this graph shows them.
void GraphPass::learn(KvBuffer& buffer) {
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer || t.tensor->layer_index < 0) continue;
    CacheLayer& layer = buffer.layers[static_cast<std::size_t>(t.tensor->layer_index)];
    if (t.use == Use::set_rows) {
      if (t.tensor->is_k && !layer.rope_seen) {
        if (const ggml_tensor* rope = rope_feeding(t.node)) layer.rope = rope_params(rope);
        layer.rope_seen = true;
      }
      // Rows are stored as a two-dimensional view of [dim, heads, tokens].
      const ggml_tensor* heads = t.node->src[0]->src[0];
      if ((t.node->src[0]->op != GGML_OP_VIEW && t.node->src[0]->op != GGML_OP_RESHAPE) || heads == nullptr ||
          heads->ne[0] * heads->ne[1] != t.tensor->n_embd)
        continue;
      (t.tensor->is_k ? layer.k_dim : layer.v_dim) = static_cast<int>(heads->ne[0]);
      layer.n_head_kv = static_cast<int>(heads->ne[1]);
    } else if (t.use == Use::attention && t.node->src[2] != nullptr) {
      layer.k_dim = static_cast<int>(t.node->src[1]->ne[0]);
      layer.v_dim = static_cast<int>(t.node->src[2]->ne[0]);
      layer.n_head_kv = static_cast<int>(t.node->src[1]->ne[2]);
    } else if (t.use == Use::shift && layer.k_dim == 0 && t.tensor->is_k) {
      layer.k_dim = static_cast<int>(t.node->nb[1] / sizeof(std::uint16_t));
      layer.n_head_kv = static_cast<int>(t.node->ne[1]);
      layer.v_dim = static_cast<int>(layer.v->n_embd / layer.n_head_kv);
      layer.rope = rope_params(t.node);
      layer.rope_seen = true;
    }
  }
}

// The first graph that touches the buffer: serve it, or leave it to stock.
void GraphPass::decide(KvBuffer& buffer) {
  const auto mine = [&](Use use) { return [&buffer, use](const Touch& t) { return t.buffer == &buffer && t.use == use; }; };
  if (positions_.empty() && std::none_of(touches_.begin(), touches_.end(), mine(Use::attention))) {
    // Rows stored without positions and before any attention: stock stores them, and they join like a loaded state.
    for (const Touch& t : touches_) {
      if (t.buffer == &buffer && t.use == Use::set_rows) buffer.mark_raw(t.node);
    }
    if (std::all_of(touches_.begin(), touches_.end(), mine(Use::set_rows))) return;
  }
  if (const std::string why = obstacle(buffer); !why.empty()) {
    buffer.give_up(why);
    return;
  }
  // Under an evaluation callback this may be a slice that shows some layers only. The artifact knows the others; without one
  // they are taken to be alike, and checked when they appear.
  const CacheLayer* shown = nullptr;
  for (const CacheLayer& layer : buffer.layers) {
    if (layer.k_dim > 0 && layer.n_head_kv > 0 && (shown == nullptr || (!shown->rope_seen && layer.rope_seen))) shown = &layer;
  }
  for (CacheLayer& layer : buffer.layers) {
    if (buffer.artifact) {
      const LayerShape& shape = buffer.artifact->find(layer.layer)->shape;
      if (layer.n_head_kv == 0) layer.n_head_kv = shape.n_head_kv;
      if (layer.k_dim == 0) layer.k_dim = shape.k_dim;
      if (layer.v_dim == 0) layer.v_dim = shape.v_dim;
      // A converted rotation file knows no RoPE.
      const bool known = shape.rope.pairing != RopePairing::none || shown == nullptr;
      if (!layer.rope_seen) layer.rope = known ? shape.rope : shown->rope;
    } else if (shown != nullptr) {
      if (layer.k_dim == 0) layer.k_dim = shown->k_dim;
      if (layer.n_head_kv == 0) layer.n_head_kv = static_cast<int>(layer.k->n_embd / layer.k_dim);
      if (!layer.rope_seen) layer.rope = shown->rope;
    }
    if (layer.v_dim == 0 && layer.n_head_kv > 0) layer.v_dim = static_cast<int>(layer.v->n_embd / layer.n_head_kv);
    if (std::int64_t{layer.n_head_kv} * layer.k_dim != layer.k->n_embd ||
        std::int64_t{layer.n_head_kv} * layer.v_dim != layer.v->n_embd) {
      buffer.give_up(fmt::format("the heads of layer {} cannot be told from this graph", layer.layer));
      return;
    }
  }
  buffer.serve();
}

// Layers shown for the first time against what is being served. Empty: they agree.
std::string GraphPass::verify(KvBuffer& buffer) {
  for (CacheLayer& layer : buffer.layers) {
    if (layer.verified || !layer.rope_seen) continue;
    const LayerSpec& spec = buffer.cache->layers()[static_cast<std::size_t>(&layer - buffer.layers.data())];
    if (spec.n_head_kv != layer.n_head_kv || spec.k_dim != layer.k_dim || spec.v_dim != layer.v_dim) {
      return fmt::format("layer {} has {} KV heads of {} and {} dimensions, expected {} of {} and {}", layer.layer,
                         layer.n_head_kv, layer.k_dim, layer.v_dim, spec.n_head_kv, spec.k_dim, spec.v_dim);
    }
    if (buffer.artifact && !buffer.codecs.empty() && buffer.recipe.k_mean == MeanMode::rope) {
      const RopeParams& expected = buffer.artifact->find(layer.layer)->shape.rope;
      if (const std::string what = difference(expected, layer.rope); !what.empty()) {
        return fmt::format(
            "layer {}: the artifact's key mean was made for another RoPE ({}); use the options the model was calibrated with, "
            "or OSCAR_CODEC=int2 with OSCAR_K_MEAN=none",
            layer.layer, what);
      }
    }
    if (const std::string what = difference(spec.rope.params(), layer.rope); !what.empty()) {
      return fmt::format("layer {} uses another RoPE than its neighbours ({}), which cannot be shifted", layer.layer, what);
    }
    layer.verified = true;
  }
  return {};
}

// The first thing in this graph that we cannot do on this buffer. Empty: none.
std::string GraphPass::obstacle(KvBuffer& buffer) {
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer) continue;
    const ggml_tensor* node = t.node;
    switch (t.use) {
      case Use::set_rows: {
        const ggml_tensor* rows = node->src[0];
        if (node->ne[0] != t.tensor->n_embd) return "flash attention is off (V is stored transposed); start with -fa on";
        if (rows->type != GGML_TYPE_F32 || rows->nb[0] != sizeof(float) || rows->ne[2] != 1 || rows->ne[3] != 1) {
          return fmt::format("rows for {} arrive as {}, not as plain f32", t.tensor->name, host().ggml_type_name(rows->type));
        }
        if (find_buffer(rows) != nullptr || root_of(node)->data != t.tensor->data)
          return fmt::format("{} is copied inside the graph", t.tensor->name);
        if (static_cast<std::int64_t>(positions_.size()) < rows->ne[1]) {
          return "this model's graph shows no token positions (no RoPE), which the windows need";
        }
        break;
      }
      case Use::attention:
        if (std::string why = attention_obstacle(buffer, t); !why.empty()) return why;
        break;
      case Use::shift:
        if (!t.tensor->is_k || node->src[1]->ne[0] != buffer.n_cells())
          return fmt::format("RoPE works on {} in an unknown way", t.tensor->name);
        if (buffer.cache) {
          const LayerSpec& spec = buffer.cache->layers()[static_cast<std::size_t>(t.tensor->layer_index)];
          if (const std::string what = difference(spec.rope.params(), rope_params(node)); !what.empty()) {
            return fmt::format("the context shift of layer {} uses another RoPE than its keys ({})", spec.layer, what);
          }
        }
        break;
      case Use::other:
        return node->op == GGML_OP_MUL_MAT
                   ? fmt::format("attention on {} does not use flash attention; start with -fa on", t.tensor->name)
                   : fmt::format("operation {} works on {}, which OSCAR does not know", host().ggml_op_name(node->op),
                                 t.tensor->name);
    }
  }
  return {};
}

std::string GraphPass::attention_obstacle(const KvBuffer& buffer, const Touch& t) const {
  const ggml_tensor* q = t.node->src[0];
  const ggml_tensor* k = t.node->src[1];
  const ggml_tensor* v = t.node->src[2];
  const ggml_tensor* mask = t.node->src[3];
  const CacheTensor* kt = find_buffer(k) == &buffer ? buffer.find(k) : nullptr;
  const CacheTensor* vt = find_buffer(v) == &buffer ? buffer.find(v) : nullptr;
  const std::string layer = fmt::format("attention of layer {}", t.tensor->layer);
  if (kt == nullptr || vt == nullptr || !kt->is_k || vt->is_k || kt->layer_index != vt->layer_index)
    return layer + " mixes caches";
  if (t.node->op_params[4] != 0) return layer + " is sparse (top-k)";
  if (mask == nullptr || mask->type != GGML_TYPE_F16 || mask->nb[0] != sizeof(std::uint16_t) || mask->ne[2] != 1 ||
      mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] || (mask->ne[3] != 1 && mask->ne[3] != q->ne[3])) {
    return layer + " has a mask of unknown shape";
  }
  if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || t.node->type != GGML_TYPE_F32)
    return layer + " has queries of unknown type";
  const auto rows_of = [](const ggml_tensor* x, const CacheTensor* c) {
    return x->nb[0] == sizeof(std::uint16_t) && x->nb[1] == c->row_bytes &&
           x->nb[2] == static_cast<std::size_t>(x->ne[0]) * 2 && x->ne[0] * x->ne[2] == c->n_embd && c->cell_of(x->data) >= 0 &&
           (x->ne[3] == 1 || x->nb[3] == c->row_bytes * static_cast<std::size_t>(c->kv_size));
  };
  if (!rows_of(k, kt) || !rows_of(v, vt) || kt->cell_of(k->data) != vt->cell_of(v->data) || k->ne[1] != v->ne[1] ||
      q->ne[3] != k->ne[3]) {
    return layer + " looks at the cache in an unknown way";
  }
  if (static_cast<std::int64_t>(positions_.size()) < q->ne[1] * q->ne[3]) {
    return "this model's graph shows no token positions (no RoPE), which the windows need";
  }
  return {};
}

void GraphPass::patch(ggml_tensor* node, ggml_custom_op_t function, void* userdata) {
  Patch p;
  p.node = node;
  p.op = node->op;
  p.flags = node->flags;
  std::memcpy(p.params, node->op_params, sizeof(p.params));
  make_custom(node, function, userdata);
  node->flags |= GGML_TENSOR_FLAG_COMPUTE;
  patches_.push_back(p);
}

void GraphPass::place(KvBuffer& buffer, const ggml_tensor* set_rows) {
  buffer.batch_cells.clear();
  const std::int64_t n = set_rows->src[0]->ne[1];
  for (std::int64_t i = 0; i < n; ++i) buffer.batch_cells.push_back(row_index(set_rows->src[1], i));
  buffer.place(buffer.batch_cells, std::span(positions_).first(static_cast<std::size_t>(n)));
}

// The mask tells which cells belong together; needed once per batch, before slots are freed.
void GraphPass::attend(KvBuffer& buffer, const Touch& touch) {
  if (!buffer.awaits_mask()) return;
  const ggml_tensor* q = touch.node->src[0];
  const ggml_tensor* k = touch.node->src[1];
  const ggml_tensor* mask = touch.node->src[3];
  const std::int64_t n = q->ne[1];
  const std::int64_t first = buffer.find(k)->cell_of(k->data);
  if (static_cast<std::int64_t>(buffer.batch_cells.size()) != n * q->ne[3])
    return;  // attention of another batch than the one placed
  std::vector<MaskView> streams;
  for (std::int64_t s = 0; s < q->ne[3]; ++s) {
    MaskView view;
    view.data = reinterpret_cast<const std::uint16_t*>(static_cast<const std::byte*>(mask->data) +
                                                       static_cast<std::size_t>(s % mask->ne[3]) * mask->nb[3]);
    view.token_stride = stride(mask->nb[1], sizeof(std::uint16_t));
    view.n_kv = k->ne[1];
    view.first_cell = first + s * buffer.find(k)->kv_size;
    view.cells = std::span(buffer.batch_cells).subspan(static_cast<std::size_t>(s * n), static_cast<std::size_t>(n));
    view.positions = std::span(positions_).subspan(static_cast<std::size_t>(s * n), static_cast<std::size_t>(n));
    streams.push_back(view);
  }
  buffer.attend(streams);
}

AttentionArgs GraphPass::attention_args(const KvBuffer& buffer, const Touch& touch, std::int64_t s) const {
  const ggml_tensor* node = touch.node;
  const ggml_tensor* q = node->src[0];
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* mask = node->src[3];
  const auto at = [s](const ggml_tensor* t) {
    return static_cast<std::byte*>(t->data) + static_cast<std::size_t>(s % t->ne[3]) * t->nb[3];
  };
  AttentionArgs a;
  a.cache = buffer.cache.get();
  a.layer_index = touch.tensor->layer_index;
  a.first_cell = touch.tensor->cell_of(k->data) + s * touch.tensor->kv_size;
  a.n_kv = k->ne[1];
  a.n_head = static_cast<int>(q->ne[2]);
  a.n_tokens = q->ne[1];
  a.positions = positions_.data() + s * q->ne[1];
  a.q = reinterpret_cast<const float*>(at(q));
  a.q_token_stride = stride(q->nb[1], sizeof(float));
  a.q_head_stride = stride(q->nb[2], sizeof(float));
  a.out = reinterpret_cast<float*>(at(node));
  a.out_head_stride = stride(node->nb[1], sizeof(float));
  a.out_token_stride = stride(node->nb[2], sizeof(float));
  a.mask = reinterpret_cast<const std::uint16_t*>(at(mask));
  a.mask_token_stride = stride(mask->nb[1], sizeof(std::uint16_t));
  a.scale = float_param(node, 0);
  a.softcap = float_param(node, 2);
  if (node->src[4] != nullptr) a.sinks = static_cast<const float*>(node->src[4]->data);
  return a;
}

void GraphPass::serve(KvBuffer& buffer) {
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer) continue;
    switch (t.use) {
      case Use::set_rows: {
        if (buffer.shifting()) buffer.shift_end();
        // K of the lowest layer opens a batch: once per batch, however the graph is sliced.
        if (t.tensor->is_k && t.tensor->layer_index == 0) place(buffer, t.node);
        RowsOp& op = rows_.emplace_back(RowsOp{buffer.cache.get(), t.node, t.tensor->layer_index, t.tensor->is_k});
        patch(t.node, RowsOp::run, &op);
        counters().set_rows.fetch_add(1);
        break;
      }
      case Use::attention: {
        if (buffer.shifting()) buffer.shift_end();
        attend(buffer, t);
        AttentionOp& op = attentions_.emplace_back();
        for (std::int64_t s = 0; s < t.node->src[0]->ne[3]; ++s) op.streams.push_back(attention_args(buffer, t, s));
        if (const float max_bias = float_param(t.node, 1); max_bias > 0) {
          op.slopes = alibi_slopes(max_bias, t.node->src[0]->ne[2]);
          for (AttentionArgs& a : op.streams) a.slopes = op.slopes.data();
        }
        op.scratch = &scratch_;
        op.check = buffer.config.check;
        op.perturb_q = buffer.config.perturb_q;
        patch(t.node, AttentionOp::run, &op);
        counters().served.fetch_add(1);
        break;
      }
      case Use::shift: {
        const auto* deltas = static_cast<const std::int32_t*>(t.node->src[1]->data);
        if (!buffer.shifting()) counters().shifts.fetch_add(1);
        buffer.shift_begin({deltas, static_cast<std::size_t>(buffer.n_cells())}, 1);
        ShiftOp& op = shifts_.emplace_back(ShiftOp{buffer.cache.get(), t.node, t.tensor->layer_index});
        patch(t.node, ShiftOp::run, &op);
        break;
      }
      case Use::other:
        fail("operation {} on {} slipped through", host().ggml_op_name(t.node->op), t.tensor->name);  // obstacle() excludes it
    }
  }
}

// Attention stays the host's; the view of its result that follows becomes the call of the sink.
void GraphPass::capture(KvBuffer& buffer, ggml_cgraph* graph) {
  CaptureSink* sink = capture_sink();
  if (sink == nullptr) return;
  const int n = host().ggml_graph_n_nodes(graph);
  for (const Touch& t : touches_) {
    if (t.buffer != &buffer) continue;
    if (t.use == Use::other && t.node->op == GGML_OP_MUL_MAT) {
      refuse(fmt::format("attention on {} does not use flash attention and cannot be captured; start with -fa on",
                         t.tensor->name));
    }
    if (t.use != Use::attention) continue;
    ggml_tensor* after = nullptr;
    for (int i = t.index + 1; i < n && after == nullptr; ++i) {
      ggml_tensor* next = host().ggml_graph_node(graph, i);
      if (!is_empty(next->op)) break;
      if (root_of(next) == t.node) after = next;
    }
    std::string why = attention_obstacle(buffer, t);
    if (why.empty() && after == nullptr)
      why = fmt::format("nothing follows the attention of layer {} in this graph", t.tensor->layer);
    const std::int64_t n_tokens = t.node->src[0]->ne[1] * t.node->src[0]->ne[3];
    if (why.empty() && static_cast<std::int64_t>(buffer.batch_cells.size()) != n_tokens) {
      why = fmt::format("the attention of layer {} has {} tokens, {} were stored", t.tensor->layer, n_tokens,
                        buffer.batch_cells.size());
    }
    if (!why.empty()) {
      counters().bypassed.fetch_add(1);
      refuse("it cannot be captured: " + why);
      continue;
    }
    const CacheLayer& layer = buffer.layers[static_cast<std::size_t>(t.tensor->layer_index)];
    CaptureOp& op = captures_.emplace_back();
    op.sink = sink;
    CaptureEvent& e = op.event;
    e.layer = layer.layer;
    e.n_head = static_cast<int>(t.node->src[0]->ne[2]);
    e.n_head_kv = layer.n_head_kv;
    e.k_dim = layer.k_dim;
    e.v_dim = layer.v_dim;
    e.n_tokens = n_tokens;
    e.n_streams = t.node->src[0]->ne[3];
    e.scale = float_param(t.node, 0);
    e.max_bias = float_param(t.node, 1);
    e.softcap = float_param(t.node, 2);
    e.q = view_of(t.node->src[0]);
    e.k = view_of(t.node->src[1]);
    e.v = view_of(t.node->src[2]);
    e.mask = view_of(t.node->src[3]);
    e.out = view_of(t.node);
    if (t.node->src[4] != nullptr) e.sinks = static_cast<const float*>(t.node->src[4]->data);
    e.k_cache = reinterpret_cast<const std::uint16_t*>(layer.k->data);
    e.v_cache = reinterpret_cast<const std::uint16_t*>(layer.v->data);
    e.cells = buffer.batch_cells;
    e.positions = std::span(positions_).first(static_cast<std::size_t>(n_tokens));
    e.rope = layer.rope;
    const auto* last = static_cast<const std::byte*>(e.mask.data) +
                       static_cast<std::size_t>((e.n_streams - 1) % e.mask.ne[3]) * e.mask.nb[3] +
                       static_cast<std::size_t>(t.node->src[0]->ne[1] - 1) * e.mask.nb[1];
    for (std::int64_t j = 0; j < e.k.ne[1]; ++j)
      e.last_visible += reinterpret_cast<const std::uint16_t*>(last)[j] != 0xFC00U ? 1 : 0;
    patch(after, CaptureOp::run, &op);
  }
}

}  // namespace oscar::llama

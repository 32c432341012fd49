#include "bench_kernel.h"

#include <ggml-cpu.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <numeric>

#include "bench_runs.h"
#include "machine.h"
#include "oscar/base/error.h"
#include "oscar/base/wait.h"

namespace oscar::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kStockBytes = std::int64_t{512} << 20;  // of the f16 caches: from here on fewer layers
constexpr std::int64_t kBatch = 512;                           // of the filling
constexpr std::int64_t kCellStep = 256;                        // llama.cpp looks at a multiple of so many cells
constexpr double kLeastSeconds = 0.1;                          // of operations in one measurement
constexpr int kMostOperations = 64;
constexpr std::uint16_t kMinusInfinity = 0xFC00;

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

ggml_type cache_type(Contender contender) {
  switch (contender) {
    case Contender::q8_0:
      return GGML_TYPE_Q8_0;
    case Contender::q4_0:
      return GGML_TYPE_Q4_0;
    default:
      return GGML_TYPE_F16;
  }
}

// --- nodes of our own; every thread of the pool calls them ------------------------------------------------------------

struct Stamp {
  Clock::time_point at;
  static void run(ggml_tensor*, int ith, int, void* userdata) {
    if (ith == 0) static_cast<Stamp*>(userdata)->at = Clock::now();
  }
};

struct Evict {
  const std::vector<std::uint64_t>* buffer = nullptr;
  std::atomic<std::uint64_t> sum{0};
  static void run(ggml_tensor*, int ith, int nth, void* userdata) {
    Evict& self = *static_cast<Evict*>(userdata);
    const std::size_t n = self.buffer->size();
    std::uint64_t sum = 0;
    constexpr std::size_t kLine = 8;
    const std::size_t end = n * static_cast<std::size_t>(ith + 1) / static_cast<std::size_t>(nth);
    for (std::size_t i = n * static_cast<std::size_t>(ith) / static_cast<std::size_t>(nth); i < end; i += kLine)
      sum += (*self.buffer)[i];
    self.sum.fetch_add(sum, std::memory_order_relaxed);
  }
};

// An exception must not leave ggml's threads; the first one is thrown again by whoever ran the graph.
struct Failure {
  std::atomic<bool> happened{false};
  std::string what;
  template <class F>
  void guard(F&& f) {
    try {
      f();
    } catch (const std::exception& error) {
      if (!happened.exchange(true)) what = error.what();
    }
  }
};

// Like the plug-in's AttentionOp (hosts/llama/cache_ops.h): the first thread prepares, all work.
struct Attend {
  AttentionArgs args;
  AttentionJob* job = nullptr;
  Failure* failure = nullptr;
  std::atomic<int> stage{0};  // 0 nobody, 1 being prepared, 2 ready
  static void run(ggml_tensor*, int ith, int nth, void* userdata) {
    Attend& self = *static_cast<Attend*>(userdata);
    int expected = 0;
    if (self.stage.compare_exchange_strong(expected, 1, std::memory_order_acq_rel)) {
      self.failure->guard([&] { self.job->prepare(self.args, nth); });
      self.stage.store(2, std::memory_order_release);
    }
    wait_until([&] { return self.stage.load(std::memory_order_acquire) == 2; });
    if (!self.failure->happened) self.failure->guard([&] { self.job->run(ith); });
  }
};

// Like the plug-in's RowsOp.
struct Store {
  KvCache* cache = nullptr;
  int layer = 0;
  bool is_k = false;
  const ggml_tensor* rows = nullptr;   // F32 [row, n]
  const ggml_tensor* cells = nullptr;  // I64 [n]
  Failure* failure = nullptr;
  static void run(ggml_tensor*, int ith, int nth, void* userdata) {
    const Store& self = *static_cast<const Store*>(userdata);
    self.failure->guard([&] {
      const auto size = size_of(self.rows->ne[0]);
      const auto* index = static_cast<const std::int64_t*>(self.cells->data);
      const std::int64_t n = self.rows->ne[1];
      const bool by_part = n < nth;
      const int part = by_part ? ith : 0;
      const int parts = by_part ? nth : 1;
      const std::int64_t end = by_part ? n : n * (ith + 1) / nth;
      for (std::int64_t i = by_part ? 0 : n * ith / nth; i < end; ++i) {
        const std::span<const float> row(static_cast<const float*>(self.rows->data) + size_of(i) * size, size);
        if (self.is_k) {
          self.cache->write_k(self.layer, index[i], row, part, parts);
        } else {
          self.cache->write_v(self.layer, index[i], row, part, parts);
        }
      }
    });
  }
};

struct ContextDeleter {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
struct BufferDeleter {
  void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};

// Tensors with memory of the backend.
class Tensors {
 public:
  explicit Tensors(std::size_t most) : context_(ggml_init({most * ggml_tensor_overhead(), nullptr, true})) {}
  ggml_tensor* add(ggml_type type, std::int64_t columns, std::int64_t rows) {
    return ggml_new_tensor_2d(context_.get(), type, columns, rows);
  }
  void allocate(ggml_backend_t backend) {
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend));
    if (!buffer_) fail("there is not enough memory for the caches of this case: use a smaller -d or --shape");
    ggml_backend_buffer_clear(buffer_.get(), 0);
  }

 private:
  std::unique_ptr<ggml_context, ContextDeleter> context_;
  std::unique_ptr<ggml_backend_buffer, BufferDeleter> buffer_;
};

// A graph of few nodes whose inputs and outputs lie elsewhere.
class Graph {
 public:
  Graph()
      : context_(ggml_init({kNodes * ggml_tensor_overhead() * 4 + ggml_graph_overhead_custom(kNodes, false), nullptr, true})) {
    graph_ = ggml_new_graph_custom(context_.get(), kNodes, false);
  }
  [[nodiscard]] ggml_context* context() const { return context_.get(); }
  void add(ggml_tensor* node) { ggml_build_forward_expand(graph_, node); }
  void custom(ggml_custom_op_t function, void* userdata) {
    ggml_tensor* node =
        ggml_custom_4d(context_.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, function, GGML_N_TASKS_MAX, userdata);
    node->data = &nowhere_;
    add(node);
  }
  void compute(ggml_backend_t backend) {
    if (ggml_backend_graph_compute(backend, graph_) != GGML_STATUS_SUCCESS) fail("ggml could not run the operation");
  }

 private:
  static constexpr std::size_t kNodes = 32;
  std::unique_ptr<ggml_context, ContextDeleter> context_;
  ggml_cgraph* graph_ = nullptr;
  float nowhere_ = 0;
};

struct TimedGraph {
  Graph graph;
  Stamp begin, end;
  Evict evict;
  std::deque<Attend> attentions;
  std::deque<Store> stores;
};

template <class Function>
Function backend_function(ggml_backend_t backend, const char* name) {
  const ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  void* address = ggml_backend_reg_get_proc_address(registry, name);
  if (address == nullptr) fail("this llama.cpp's CPU backend has no function {}", name);
  return reinterpret_cast<Function>(address);
}

}  // namespace

const char* to_text(Contender contender) {
  switch (contender) {
    case Contender::ours:
      return "ours";
    case Contender::f16:
      return "f16";
    case Contender::q8_0:
      return "q8_0";
    case Contender::q4_0:
      return "q4_0";
  }
  return "";
}

GgmlThreads::GgmlThreads(int n_threads, bool cold) : n_threads_(n_threads) {
  const ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) fail("llama.cpp's CPU backend could not be loaded");
  backend_ = ggml_backend_dev_init(device, nullptr);
  if (backend_ == nullptr) fail("llama.cpp's CPU backend could not be started");
  ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
  pool_ = backend_function<decltype(&ggml_threadpool_new)>(backend_, "ggml_threadpool_new")(&params);
  if (pool_ == nullptr) fail("ggml cannot start {} threads", n_threads);
  backend_function<decltype(&ggml_backend_cpu_set_n_threads)>(backend_, "ggml_backend_set_n_threads")(backend_, n_threads);
  backend_function<decltype(&ggml_backend_cpu_set_threadpool)>(backend_, "ggml_backend_cpu_set_threadpool")(backend_, pool_);
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  if (cold) eviction_.assign(std::clamp(2 * this_machine().last_cache_bytes, 32 * kMiB, 512 * kMiB) / sizeof(std::uint64_t), 1);
}

GgmlThreads::~GgmlThreads() {
  backend_function<decltype(&ggml_threadpool_free)>(backend_, "ggml_threadpool_free")(pool_);
  ggml_backend_free(backend_);
}

struct KernelWorld::Impl {
  Impl(GgmlThreads& threads_, const KernelSetup& setup_)
      : threads(threads_), setup(setup_), source(setup.shape, setup.codec, setup.rope_mean), data(64) {
    const auto row = static_cast<std::int64_t>(source.row_size());
    n_cells = (setup.depth + std::max<std::int64_t>(setup.n_tokens, 1) + kCellStep - 1) / kCellStep * kCellStep;
    n_layers = std::clamp<std::int64_t>(kStockBytes / (n_cells * row * 4), 1, kLayers);
    std::vector<LayerSpec> specs;
    for (std::int64_t i = 0; i < n_layers; ++i) specs.push_back(source.spec(static_cast<int>(i)));
    cache = std::make_unique<KvCache>(n_cells, setup.windows, std::move(specs));
    for (const Contender c : setup.stock) {
      for (std::int64_t i = 0; i < n_layers; ++i) {
        k[c].push_back(data.add(cache_type(c), row, n_cells));
        v[c].push_back(data.add(cache_type(c), row, n_cells));
      }
    }
    const std::int64_t most = std::max(kBatch, setup.n_tokens);
    k_rows = data.add(GGML_TYPE_F32, row, most);
    v_rows = data.add(GGML_TYPE_F32, row, most);
    cells = data.add(GGML_TYPE_I64, most, 1);
    const std::int64_t width = std::int64_t{setup.shape.n_head} * setup.shape.dim;
    q = data.add(GGML_TYPE_F32, width, std::max<std::int64_t>(setup.n_tokens, 1));
    mask = data.add(GGML_TYPE_F16, n_cells, std::max<std::int64_t>(setup.n_tokens, 1));
    for (ggml_tensor*& out : outs) out = data.add(GGML_TYPE_F32, width, std::max<std::int64_t>(setup.n_tokens, 1));
    data.allocate(threads.backend());
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < ggml_nelements(q); ++i) static_cast<float*>(q->data)[i] = normal(rng);
  }

  // Tokens [first, first + n) become the batch: in our cache's books, and as rows to store.
  void begin_batch(std::int64_t first, std::int64_t n) {
    std::vector<std::int32_t> batch_positions;
    for (std::int64_t i = 0; i < n; ++i) {
      static_cast<std::int64_t*>(cells->data)[i] = first + i;
      batch_positions.push_back(static_cast<std::int32_t>(first + i));
      const std::size_t size = source.row_size();
      source.key(first + i, {static_cast<float*>(k_rows->data) + size_of(i) * size, size});
      source.value(first + i, {static_cast<float*>(v_rows->data) + size_of(i) * size, size});
    }
    cache->place({static_cast<const std::int64_t*>(cells->data), size_of(n)}, batch_positions,
                 std::vector<SeqId>(size_of(n), 0));
  }

  ggml_tensor* first_rows(Graph& graph, ggml_tensor* rows, std::int64_t n) const {
    return ggml_view_2d(graph.context(), rows, rows->ne[0], n, rows->nb[1], 0);
  }

  void add_stores(TimedGraph& timed, Contender contender, std::int64_t layer, std::int64_t n) {
    Graph& graph = timed.graph;
    ggml_tensor* index = ggml_view_1d(graph.context(), cells, n, 0);
    for (const bool is_k : {true, false}) {
      ggml_tensor* rows = first_rows(graph, is_k ? k_rows : v_rows, n);
      if (contender == Contender::ours) {
        Store& store = timed.stores.emplace_back(Store{cache.get(), static_cast<int>(layer), is_k, rows, index, &failure});
        graph.custom(Store::run, &store);
      } else {
        graph.add(ggml_set_rows(graph.context(), (is_k ? k : v).at(contender)[size_of(layer)], rows, index));
      }
    }
  }

  // n query tokens, the last of the cache so far.
  void add_attention(TimedGraph& timed, Contender contender, std::int64_t layer, std::int64_t n) {
    Graph& graph = timed.graph;
    ggml_context* context = graph.context();
    const std::int64_t dim = setup.shape.dim;
    ggml_tensor* out = outs[static_cast<std::size_t>(contender)];
    const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
    if (contender == Contender::ours) {
      Attend& attend = timed.attentions.emplace_back();
      attend.job = &job;
      attend.failure = &failure;
      AttentionArgs& a = attend.args;
      a.cache = cache.get();
      a.layer_index = static_cast<int>(layer);
      a.n_kv = n_kv;
      a.n_head = setup.shape.n_head;
      a.n_tokens = n;
      a.positions = positions.data();
      a.q = static_cast<const float*>(q->data);
      a.q_head_stride = a.out_head_stride = dim;
      a.q_token_stride = a.out_token_stride = dim * setup.shape.n_head;
      a.out = static_cast<float*>(out->data);
      a.mask = static_cast<const std::uint16_t*>(mask->data);
      a.mask_token_stride = n_kv;
      a.scale = scale;
      graph.custom(Attend::run, &attend);
      return;
    }
    // As llama.cpp's graphs see queries [dim, token, head] and caches [dim, cell, KV head].
    ggml_tensor* queries = ggml_view_3d(context, q, dim, setup.shape.n_head, n, sizeof(float) * size_of(dim), q->nb[1], 0);
    queries = ggml_permute(context, queries, 0, 2, 1, 3);
    const auto heads = [&](ggml_tensor* cache_rows) {
      ggml_tensor* view = ggml_view_3d(context, cache_rows, dim, setup.shape.n_head_kv, n_kv,
                                       ggml_row_size(cache_rows->type, dim), cache_rows->nb[1], 0);
      return ggml_permute(context, view, 0, 2, 1, 3);
    };
    ggml_tensor* visible = ggml_view_2d(context, mask, n_kv, n, sizeof(std::uint16_t) * size_of(n_kv), 0);
    ggml_tensor* node = ggml_flash_attn_ext(context, queries, heads(k.at(contender)[size_of(layer)]),
                                            heads(v.at(contender)[size_of(layer)]), visible, scale, 0.0F, 0.0F);
    node->data = out->data;
    graph.add(node);
  }

  void fill(const std::function<void(double)>& filled) {
    std::map<std::int64_t, std::unique_ptr<TimedGraph>> batches;  // by tokens of a batch
    for (std::int64_t first = 0; first < setup.depth; first += kBatch) {
      const std::int64_t n = std::min(kBatch, setup.depth - first);
      begin_batch(first, n);
      for (std::int64_t layer = 0; layer < n_layers; ++layer) {
        std::unique_ptr<TimedGraph>& graph = batches[n * n_layers + layer];
        if (!graph) {
          graph = std::make_unique<TimedGraph>();
          add_stores(*graph, Contender::ours, layer, n);
          for (const Contender c : setup.stock) add_stores(*graph, c, layer, n);
        }
        compute(*graph);
      }
      filled(static_cast<double>(first + n) / static_cast<double>(setup.depth));
    }
  }

  void compute(TimedGraph& timed) {
    for (Attend& attend : timed.attentions) attend.stage.store(0);
    timed.graph.compute(threads.backend());
    if (failure.happened) throw Error(failure.what);
  }

  void prepare(KernelOperation next) {
    operation = next;
    for (auto& [contender, list] : graphs) list.clear();
    seconds.clear();
    const bool one = next == KernelOperation::decode || next == KernelOperation::append_one;
    n_batch = one ? 1 : setup.n_tokens;
    n_kv = (setup.depth + n_batch + kCellStep - 1) / kCellStep * kCellStep;
    if (!one || !batch_stored) {
      cache->truncate(0, static_cast<std::int32_t>(setup.depth));
      begin_batch(setup.depth, n_batch);
      positions.clear();
      auto* cell = static_cast<std::uint16_t*>(mask->data);
      for (std::int64_t t = 0; t < n_batch; ++t) {
        positions.push_back(static_cast<std::int32_t>(setup.depth + t));
        for (std::int64_t j = 0; j < n_kv; ++j) *cell++ = j <= setup.depth + t ? 0 : kMinusInfinity;
      }
      TimedGraph stores;
      for (std::int64_t layer = 0; layer < n_layers; ++layer) {
        TimedGraph graph;
        add_stores(graph, Contender::ours, layer, n_batch);
        for (const Contender c : setup.stock) add_stores(graph, c, layer, n_batch);
        compute(graph);
      }
      batch_stored = true;
    }
  }

  TimedGraph& graph_of(Contender contender, std::int64_t layer) {
    auto& list = graphs[contender];
    if (list.empty()) list.resize(size_of(n_layers));
    std::unique_ptr<TimedGraph>& timed = list[size_of(layer)];
    if (timed) return *timed;
    timed = std::make_unique<TimedGraph>();
    if (!threads.eviction().empty()) {
      timed->evict.buffer = &threads.eviction();
      timed->graph.custom(Evict::run, &timed->evict);
    }
    timed->graph.custom(Stamp::run, &timed->begin);
    if (operation == KernelOperation::decode || operation == KernelOperation::prefill) {
      add_attention(*timed, contender, layer, n_batch);
    } else {
      add_stores(*timed, contender, layer, n_batch);
    }
    timed->graph.custom(Stamp::run, &timed->end);
    return *timed;
  }

  double run_once(Contender contender) {
    const std::int64_t layer = next_layer[contender]++ % n_layers;
    TimedGraph& timed = graph_of(contender, layer);
    compute(timed);
    return std::chrono::duration<double>(timed.end.at - timed.begin.at).count();
  }

  double measure(Contender contender) {
    const double wanted = std::ceil(kLeastSeconds / std::max(seconds.at(contender), 1e-9));
    std::vector<double> times;
    for (int i = static_cast<int>(std::clamp<double>(wanted, 1, kMostOperations)); i > 0; --i)
      times.push_back(run_once(contender));
    return spread_of(std::move(times)).median;
  }

  GgmlThreads& threads;
  KernelSetup setup;
  BenchLayer source;
  Tensors data;
  std::int64_t n_cells = 0, n_layers = 0;
  std::unique_ptr<KvCache> cache;
  std::map<Contender, std::vector<ggml_tensor*>> k, v;  // stock, per layer [row, cell]
  ggml_tensor *k_rows = nullptr, *v_rows = nullptr, *cells = nullptr, *q = nullptr, *mask = nullptr;
  std::array<ggml_tensor*, kContenders> outs{};
  AttentionJob job;
  Failure failure;

  KernelOperation operation = KernelOperation::decode;
  bool batch_stored = false;
  std::int64_t n_batch = 0, n_kv = 0;
  std::vector<std::int32_t> positions;  // of the batch
  std::map<Contender, std::vector<std::unique_ptr<TimedGraph>>> graphs;
  std::map<Contender, std::int64_t> next_layer;
  std::map<Contender, double> seconds;  // of the warm-up
};

KernelWorld::KernelWorld(GgmlThreads& threads, const KernelSetup& setup, const std::function<void(double)>& filled)
    : impl_(std::make_unique<Impl>(threads, setup)) {
  impl_->fill(filled);
}
KernelWorld::~KernelWorld() = default;

void KernelWorld::prepare(KernelOperation operation) { impl_->prepare(operation); }
void KernelWorld::warm_up(Contender contender) { impl_->seconds[contender] = impl_->run_once(contender); }
double KernelWorld::measure(Contender contender) { return impl_->measure(contender); }

double KernelWorld::difference() const {
  const auto* ours = static_cast<const float*>(impl_->outs[static_cast<std::size_t>(Contender::ours)]->data);
  const auto* stock = static_cast<const float*>(impl_->outs[static_cast<std::size_t>(Contender::f16)]->data);
  const std::int64_t n = impl_->n_batch * impl_->setup.shape.n_head * impl_->setup.shape.dim;
  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double delta = static_cast<double>(ours[i]) - static_cast<double>(stock[i]);
    error += delta * delta;
    norm += static_cast<double>(stock[i]) * static_cast<double>(stock[i]);
  }
  return norm > 0 ? std::sqrt(error / norm) : std::numeric_limits<double>::infinity();
}

double KernelWorld::work() const {
  const Impl& impl = *impl_;
  const auto n = static_cast<double>(impl.n_batch);
  if (impl.operation == KernelOperation::append || impl.operation == KernelOperation::append_one)
    return 2 * n * static_cast<double>(impl.source.row_size());
  return impl.setup.shape.n_head * (n * static_cast<double>(impl.setup.depth) + n * (n + 1) / 2);
}

}  // namespace oscar::cli

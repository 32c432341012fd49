// Compares the device's decode attention with the double-precision reference on sizes that are awkward on purpose. Needs a GPU,
// so it is a program of its own and no test of ctest.
// usage: decode_check [--quick] [--only TEXT]      --quick: small cases only (for compute-sanitizer)
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>

#include "cuda/runtime.h"
#include "device_ids.h"
#include "oscar/cuda/decode.h"
#include "random_layer.h"

namespace {

using namespace oscar;
using cuda::check;
using cuda::DeviceArray;
using test::PagedWorld;
using test::WorldShape;

// Bounded from both sides: an error of exactly nothing would mean that the reference compares with itself.
constexpr double kMostError = 1e-3;
constexpr double kLeastError = 1e-7;
constexpr double kMostLse = 1e-2;  // nats; a logit's error is 2^-12 of the largest weights of its query

struct Case {
  const char* name;
  int dim;
  std::vector<int> slots;
  double mean;
  WorldShape shape;
  std::size_t far_bytes = 0;  // pages are moved so far into the pool
  test::Wide wide = test::Wide::none;
  bool int2 = false;         // as many heads as slots says
  bool values_mean = false;  // of `int2`
  double rope_base = 1e6;
};

using Workspace = std::shared_ptr<DeviceArray<std::uint8_t>>;
Workspace make_workspace(std::size_t bytes) {
  auto made = std::make_shared<DeviceArray<std::uint8_t>>(bytes);
  check(cudaMemsetAsync(made->data(), 0, cuda::decode_control_bytes(), nullptr), "cudaMemset");
  return made;
}

class OnDevice {
 public:
  // workspace: null: one of its own.
  OnDevice(const PagedWorld& world, std::size_t far_bytes, test::Wide wide = test::Wide::none, Workspace workspace = nullptr)
      : tables_(test::on_device(world.spectral_tables(), world.int2_tables())),
        q_(world.q),
        blocks_(world.blocks),
        lengths_(world.shape().lengths),
        page_table_(world.page_table, test::wide_pages(wide), first_page(world, far_bytes)),
        block_table_(world.block_table, test::wide_blocks(wide)),
        sinks_(world.sinks) {
    const std::size_t page_bytes = world.layout().page_bytes;
    const std::int32_t first = first_page(world, far_bytes);
    pages_ = DeviceArray<std::uint8_t>(static_cast<std::size_t>(first) * page_bytes + world.pages.size());
    check(cudaMemcpy(pages_.data() + static_cast<std::size_t>(first) * page_bytes, world.pages.data(), world.pages.size(),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
    const auto batch = static_cast<int>(world.shape().lengths.size());
    const std::size_t rows = world.q.size() / test::size_of(world.layout().head_dim);
    out_ = DeviceArray<std::uint16_t>(world.q.size());
    lse_ = DeviceArray<float>(rows);
    workspace_ =
        workspace != nullptr
            ? workspace
            : make_workspace(cuda::decode_workspace_bytes(tables_->view(), batch, world.shape().group, world.shape().queries));
    args_.layer = &tables_->view();
    args_.batch = batch;
    args_.group = world.shape().group;
    args_.queries = world.shape().queries;
    args_.soft_cap = world.shape().soft_cap;
    args_.sink = world.shape().sink;
    args_.recent = world.shape().recent;
    args_.scale = world.scale();
    args_.q = q_.data();
    args_.lengths = lengths_.data();
    args_.pages = pages_.data();
    args_.page_table = page_table_.table();
    args_.page_columns = world.page_columns;
    args_.blocks = blocks_.data();
    args_.block_table = block_table_.table();
    args_.ring = world.ring;
    args_.sinks = world.sinks.empty() ? nullptr : sinks_.data();
    args_.out = out_.data();
    args_.lse = lse_.data();
    args_.workspace = workspace_->data();
    args_.workspace_bytes = workspace_->size();
  }

  // Output and workspace are poisoned first, but for what decodes leave zero.
  void run(cudaStream_t stream = nullptr) {
    check(cudaMemsetAsync(out_.data(), 0xFF, out_.size() * 2, stream), "cudaMemset");
    check(cudaMemsetAsync(lse_.data(), 0xFF, lse_.size() * 4, stream), "cudaMemset");
    const std::size_t control = cuda::decode_control_bytes();
    check(cudaMemsetAsync(workspace_->data() + control, 0xFF, workspace_->size() - control, stream), "cudaMemset");
    cuda::decode(args_, stream);
  }
  // Other contents of the same sizes, in the same places.
  void load(const PagedWorld& world) {
    q_.upload(world.q);
    blocks_.upload(world.blocks);
    lengths_.upload(world.shape().lengths);
    pages_.upload(world.pages);
    page_table_.upload(world.page_table);
    block_table_.upload(world.block_table);
  }
  [[nodiscard]] std::vector<std::uint16_t> out() const { return out_.download(); }
  [[nodiscard]] std::vector<float> lse() const { return lse_.download(); }
  [[nodiscard]] bool control_is_zero() const {
    const std::vector<std::uint8_t> all = workspace_->download();
    return std::all_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(cuda::decode_control_bytes()),
                       [](std::uint8_t x) { return x == 0; });
  }

 private:
  static std::int32_t first_page(const PagedWorld& world, std::size_t far_bytes) {
    const std::size_t page_bytes = world.layout().page_bytes;
    return static_cast<std::int32_t>((far_bytes + page_bytes - 1) / page_bytes);
  }

  std::unique_ptr<cuda::LayerTables> tables_;
  DeviceArray<std::uint16_t> q_, blocks_, out_;
  DeviceArray<std::int32_t> lengths_;
  test::DeviceIds page_table_, block_table_;
  DeviceArray<std::uint8_t> pages_;
  Workspace workspace_;
  DeviceArray<float> sinks_, lse_;
  cuda::DecodeArgs args_;
};

struct Errors {
  double all = 0, worst_row = 0, lse = 0;
  int bad_rows = 0;    // off by more than a hundredth
  bool wrong = false;  // NaN, or something where nothing must be
};

Errors compare(const PagedWorld& world, const std::vector<std::uint16_t>& out, const std::vector<float>& lse) {
  const paged::DecodeProblem problem = world.problem();
  const int heads = world.layout().n_head_kv * problem.group;
  const int dim = world.layout().head_dim;
  const int each = heads * problem.queries;  // rows of a sequence
  std::vector<paged::DecodeRow> rows(test::size_of(problem.batch * each));
  std::atomic<int> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (int r = next++; r < problem.batch * each; r = next++)
        rows[test::size_of(r)] = paged::decode_reference(problem, r / each, r % heads, r % each / heads);
    });
  }
  for (std::thread& t : threads) t.join();

  Errors e;
  double difference = 0, norm = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    double row_difference = 0, row_norm = 0;
    for (int d = 0; d < dim; ++d) {
      const double got = half_to_float(out[r * test::size_of(dim) + test::size_of(d)]);
      const double want = rows[r].out[test::size_of(d)];
      row_difference += (got - want) * (got - want);
      row_norm += want * want;
    }
    difference += row_difference;
    norm += row_norm;
    if (!std::isfinite(row_difference) || (row_norm == 0 && row_difference != 0)) e.wrong = true;
    if (!(row_difference <= 1e-4 * row_norm) && ++e.bad_rows <= 4) {
      std::printf(
          "  sequence %d (%d tokens), query %d, head %d: relative error %.2e, lse %.4f for %.4f, values %.4f %.4f %.4f for "
          "%.4f "
          "%.4f %.4f\n",
          static_cast<int>(r) / each, problem.lengths[r / test::size_of(each)], static_cast<int>(r) % each / heads,
          static_cast<int>(r) % heads, std::sqrt(row_difference / row_norm), lse[r], rows[r].lse,
          half_to_float(out[r * test::size_of(dim)]), half_to_float(out[r * test::size_of(dim) + 1]),
          half_to_float(out[(r + 1) * test::size_of(dim) - 1]), rows[r].out[0], rows[r].out[1], rows[r].out.back());
    }
    if (row_norm > 0) e.worst_row = std::max(e.worst_row, std::sqrt(row_difference / row_norm));
    if (std::isfinite(rows[r].lse)) {
      e.lse = std::max(e.lse, std::abs(static_cast<double>(lse[r]) - rows[r].lse));
      if (!std::isfinite(lse[r])) e.wrong = true;
    } else if (lse[r] != -std::numeric_limits<float>::infinity()) {
      e.wrong = true;
    }
  }
  e.all = norm > 0 ? std::sqrt(difference / norm) : 0;
  return e;
}

bool run_case(const Case& c, bool quick) {
  const test::RandomLayer layer(c.int2, c.dim, c.slots, c.mean, c.values_mean, 7, c.rope_base);
  const PagedWorld world = layer.world(c.shape, 11);
  OnDevice device(world, c.far_bytes, c.wide);
  device.run();
  check(cudaDeviceSynchronize(), c.name);
  const std::vector<std::uint16_t> out = device.out();
  const std::vector<float> lse = device.lse();
  const Errors e = compare(world, out, lse);
  bool same = true;
  for (int i = 0; i < (quick ? 1 : 25) && same; ++i) {
    device.run();
    check(cudaDeviceSynchronize(), c.name);
    const std::vector<float> again = device.lse();
    same = device.out() == out && std::memcmp(again.data(), lse.data(), lse.size() * 4) == 0;
  }
  // A sequence of one token is its value, exactly.
  const bool rounds = std::any_of(c.shape.lengths.begin(), c.shape.lengths.end(), [](int n) { return n > 1; });
  const bool left_zero = device.control_is_zero();
  if (!left_zero) std::printf("  the workspace's first bytes are not zero afterwards\n");
  const bool good =
      left_zero && !e.wrong && e.all <= kMostError && (!rounds || e.all >= kLeastError) && e.lse < kMostLse && same;
  std::printf("%-34s L2 %.2e  worst row %.2e  lse %.1e  repeats %s  %s\n", c.name, e.all, e.worst_row, e.lse,
              same ? "equal" : "DIFFER", good ? "ok" : "FAILED");
  std::fflush(stdout);
  return good;
}

bool is_right(const PagedWorld& world, const OnDevice& device) {
  const Errors e = compare(world, device.out(), device.lse());
  return !e.wrong && e.all < kMostError && e.lse < kMostLse && device.control_is_zero();
}

// One graph, captured once, replayed while sequences grow, come and end.
bool run_graph() {
  const paged::SpectralTables tables = test::random_tables(128, {128, 128}, 1.0, 7);
  bool good = true;
  WorldShape shape;
  shape.capacity = 3000;
  std::unique_ptr<OnDevice> device;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{5, 700, 0}, {6, 3000, 321}, {0, 0, 0}, {7, 701, 322}}) {
    shape.lengths = lengths;
    const PagedWorld world(tables, shape, 5);
    if (device == nullptr) {
      device = std::make_unique<OnDevice>(world, 0);
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
      device->run(stream);
      check(cudaStreamEndCapture(stream, &graph), "capture");
      check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    }
    device->load(world);
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "a graph");
    good = good && is_right(world, *device);
  }
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::printf("%-34s %s\n", "graph replayed with other lengths", good ? "ok" : "FAILED");
  return good;
}

// Decodes of different batches, layers and codecs take turns with one workspace, as a server's do.
bool run_shapes() {
  const test::RandomLayer one(false, 128, {128}, 1.0, false, 7);
  const test::RandomLayer two(false, 64, {64, 32}, 0.0, false, 8);
  const test::RandomLayer coarse(true, 128, {128, 128}, 0.0, false, 9);
  const Workspace workspace = make_workspace(64U << 20);
  bool good = true;
  for (const int batch : {1, 3, 1, 65, 2, 140}) {
    for (const test::RandomLayer* layer : {&one, &two, &coarse}) {
      WorldShape shape;
      shape.lengths.assign(test::size_of(batch), 3);
      shape.lengths.front() = 460;
      const PagedWorld world = layer->world(shape, 11);
      OnDevice device(world, 0, test::Wide::none, workspace);
      device.run();
      check(cudaDeviceSynchronize(), "shapes in turns");
      good = good && is_right(world, device);
    }
  }
  std::printf("%-34s %s\n", "shapes in turns, one workspace", good ? "ok" : "FAILED");
  return good;
}

std::vector<Case> cases(bool quick) {
  const std::vector<int> eight = {128, 128, 128, 128, 128, 128, 128, 128};
  const std::vector<int> uneven = {32, 240, 144, 96};
  std::vector<Case> list;
  const auto add = [&](const char* name, int dim, std::vector<int> slots, double mean, WorldShape shape, std::size_t far = 0) {
    list.push_back({name, dim, std::move(slots), mean, std::move(shape), far});
  };
  add("D 128, one token", 128, {128}, 0, {4, 64, 256, {1}});
  add("D 128, coded from token 2 on", 128, {128, 96}, 0, {4, 0, 1, {700}});
  add("D 128, window borders", 128, {128, 80}, 1, {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 383, 384, 385}});
  add("D 64, uneven heads, mean", 64, {16, 112, 64}, 1, {3, 16, 40, {700, 0, 97, 1000}});
  add("D 256, group 2", 256, {256, 208}, 1, {2, 64, 256, {900, 64}});
  add("D 128, group 8, mean, sink logits", 128, uneven, 1, {8, 64, 256, {0, 650, 333, 1}, 0, true});
  add("D 128, 2 queries, group 2, soft cap", 128, {128, 96}, 1,
      {2, 64, 256, {1, 2, 65, 320, 321, 322, 385}, 0, false, 2, 2.5F});
  add("D 64, 3 queries, group 4", 64, {64, 112}, 0, {4, 16, 40, {3, 2, 58, 59, 130, 105}, 0, true, 3});
  add("D 64, all pairs fast", 64, {64}, 1, {4, 64, 256, {650, 1000}});
  list.back().rope_base = 100;
  add("D 128, all pairs slow", 128, {128}, 1, {4, 64, 256, {650, 1000}});
  list.back().rope_base = 1e30;
  add("D 128, ids of 64 bits", 128, uneven, 1, {4, 64, 256, {0, 650, 400, 1300}});
  list.back().wide = test::Wide::both;
  const auto add_int2 = [&](const char* name, int dim, int heads, double mean, WorldShape shape, bool values_mean = false,
                            std::size_t far = 0) {
    add(name, dim, std::vector<int>(test::size_of(heads), dim), mean, std::move(shape), far);
    list.back().int2 = true;
    list.back().values_mean = values_mean;
  };
  add_int2("int2, D 128, window borders", 128, 2, 0, {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 383, 384, 385, 700}});
  add_int2("int2, D 64, group 3, both means", 64, 3, 1, {3, 16, 40, {700, 0, 97, 1000}, 0, true}, true);
  add_int2("int2, D 128, 3 queries, group 4, mean", 128, 2, 1, {4, 64, 256, {2, 320, 700, 385}, 0, false, 3, 2.5F}, true);
  add_int2("int2, D 256, group 2", 256, 1, 1, {2, 64, 256, {900, 64}}, true);
  if (quick) return list;
  add_int2("int2, D 128, batch 17, ragged", 128, 8, 1,
           {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 20000, 0, 97, 4096, 77, 12345, 0, 385, 1000, 513}}, true);
  add_int2("int2, D 128, batch 17, no mean", 128, 8, 0,
           {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 20000, 0, 97, 4096, 77, 12345, 0, 385, 1000, 513}});
  add_int2("int2, D 128, group 16", 128, 2, 0, {16, 64, 256, {5000, 3}}, true);
  add_int2("int2, D 128, 8 queries, no sink", 128, 2, 1, {4, 0, 1, {700, 4001, 9}, 0, true, 8});
  add_int2("int2, D 64, batch 40, short", 64, 2, 1, {4, 64, 256, std::vector<std::int32_t>(40, 600)}, true);
  add_int2("int2, D 256, group 8, mean", 256, 2, 1, {8, 64, 256, {6000, 401}});
  add_int2("int2, D 128, pages past 2^32 bytes", 128, 8, 0, {4, 64, 256, {3000, 2000}}, false, 5'000'000'000);
  add("D 128, page ids of 64 bits", 128, uneven, 1, {4, 64, 256, {0, 6500, 333, 1300}});
  list.back().wide = test::Wide::pages;
  add("D 128, batch 17, ragged", 128, eight, 1,
      {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 20000, 0, 97, 4096, 77, 12345, 0, 385, 1000, 513}});
  add("D 128, batch 17, no mean", 128, eight, 0,
      {4, 64, 256, {1, 63, 64, 65, 319, 320, 321, 20000, 0, 97, 4096, 77, 12345, 0, 385, 1000, 513}});
  add("D 128, 30001 tokens, uneven heads", 128, uneven, 1, {4, 64, 256, {30001}});
  add("D 128, most pairs fast", 128, {128}, 1, {4, 64, 256, {20000, 300}});
  list.back().rope_base = 1e4;
  add("D 128, most pairs fast, group 8", 128, {128}, 1, {8, 64, 256, {20000, 300}});
  list.back().rope_base = 1e4;
  add("D 128, large mean", 128, {128, 128}, 10, {4, 64, 256, {9000, 5000}});
  add("D 128, group 1", 128, {128, 112}, 1, {1, 64, 256, {5000, 3}});
  add("D 128, group 6, sink logits", 128, {128, 112}, 1, {6, 64, 256, {5000, 3, 0}, 0, true});
  add("D 128, group 7, no mean", 128, {112, 128}, 0, {7, 4 * 16, 256, {5000, 300}});
  add("D 128, group 12", 128, {128, 112}, 1, {12, 64, 256, {5000, 3}});
  add("D 128, group 16, no mean", 128, {128, 112}, 0, {16, 64, 256, {2000, 3}});
  add("D 64, batch 40, short", 64, {64, 48}, 1, {4, 64, 256, std::vector<std::int32_t>(40, 600)});
  add("D 64, group 7", 64, {64, 48}, 0, {7, 64, 256, {20000}});
  add("D 256, group 8, mean", 256, {256, 304}, 1, {8, 64, 256, {6000, 401}});
  add("D 128, 8 queries, group 4", 128, eight, 1,
      {4, 64, 256, {5, 8, 64, 71, 320, 327, 328, 9000, 0, 4097, 383, 391}, 0, false, 8});
  add("D 128, 5 queries, group 1, soft cap", 128, uneven, 1, {1, 64, 256, {20000, 333, 2}, 0, false, 5, 1.5F});
  add("D 128, 8 queries, group 16", 128, {128}, 0, {16, 64, 256, {700, 4000}, 0, true, 8});
  add("D 256, 4 queries, group 2", 256, {256, 304}, 1, {2, 64, 256, {2000, 401, 3}, 0, false, 4});
  add("D 128, 4 queries, no sink, recent 1", 128, {128, 96}, 0, {1, 0, 1, {700, 4, 1}, 0, false, 4});
  add("D 128, soft cap", 128, {128, 96}, 1, {4, 64, 256, {5000, 300}, 0, false, 1, 2.0F});
  add("all empty", 128, {128}, 1, {4, 64, 256, {0, 0}});
  add("pages past 2^32 bytes", 128, eight, 0, {4, 64, 256, {3000, 2000}}, 5'000'000'000);
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quick") quick = true;
    if (flag == "--only" && i + 1 < argc) only = argv[++i];
  }
  int failed = 0;
  try {
    for (const Case& c : cases(quick)) {
      if (std::string(c.name).find(only) != std::string::npos) failed += static_cast<int>(!run_case(c, quick));
    }
    if (only.empty()) failed += static_cast<int>(!run_graph()) + static_cast<int>(!run_shapes());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "decode_check: error: %s\n", e.what());
    return 1;
  }
  std::printf("%s\n", failed == 0 ? "all cases agree with the reference" : "SOME CASES FAILED");
  return failed == 0 ? 0 : 1;
}

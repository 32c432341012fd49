// Compares the device's prefill attention with the double-precision reference on sizes that are awkward on purpose. Needs a
// GPU, so it is a program of its own and no test of ctest. usage: prefill_check [--quick] [--only TEXT]
// --quick: small cases only (for compute-sanitizer)
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "cuda/prefill_params.h"
#include "cuda/runtime.h"
#include "device_ids.h"
#include "oscar/cuda/prefill.h"
#include "random_layer.h"

namespace {

using namespace oscar;
using cuda::check;
using cuda::DeviceArray;
using test::PagedWorld;
using test::size_of;
using test::WorldShape;

// Bounded from both sides: an error of exactly nothing would mean that the reference compares with itself.
// The basis of the keys and the keys themselves are rounded to binary16: at logits of 3 to 4 nats that alone is 1e-3.
constexpr double kMostError = 1.25e-3;
constexpr double kLeastError = 1e-7;
constexpr double kMostLse = 2e-2;        // nats; a logit of 45 nats, as there are here, is off by some 2^-12 of its size
constexpr std::size_t kMostRows = 3000;  // of a case that the reference computes
constexpr std::uint16_t kNan = 0x7E00;

struct Case {
  const char* name;
  int dim;
  std::vector<int> slots;
  double mean;
  WorldShape shape;           // lengths: prefix and chunk; queries: the longest chunk, filled in
  std::vector<int> chunks;    // per sequence
  std::size_t far_bytes = 0;  // pages are moved so far into the pool
  test::Wide wide = test::Wide::none;
  bool int2 = false;         // as many heads as slots says
  bool values_mean = false;  // of `int2`
  bool portable = false;     // not the kernel of compute capability 9.0, which would serve the case
};

// What a prefill reads of a world: the queries and rows of the chunks one after the other, and a ring that holds no more than
// the rows before them; all else is NaN.
struct Inputs {
  std::vector<std::uint16_t> q, k, v, blocks;
  std::vector<std::int32_t> query_start{0}, block_table;
  int ring = 0;
};

Inputs inputs_of(const PagedWorld& world, const std::vector<int>& chunks) {
  const WorldShape& shape = world.shape();
  const auto heads = size_of(world.layout().n_head_kv);
  const auto dim = size_of(world.layout().head_dim);
  const std::size_t query_row = heads * size_of(shape.group) * dim;
  const std::size_t values = paged::exact_head_values(static_cast<int>(dim));
  const int sink_columns = shape.sink / paged::kBlockTokens;
  Inputs in;
  in.ring = paged::ring_blocks(shape.recent);
  const int columns = sink_columns + in.ring;
  in.block_table.assign(chunks.size() * size_of(columns), -1);
  for (std::size_t b = 0; b < chunks.size(); ++b) {
    const int chunk = chunks[b];
    const int length = shape.lengths[b];
    const int start = length - chunk;
    in.query_start.push_back(in.query_start.back() + chunk);
    const auto* q = world.q.data() + (b * size_of(shape.queries) + size_of(shape.queries - chunk)) * query_row;
    in.q.insert(in.q.end(), q, q + size_of(chunk) * query_row);
    const auto row = [&](int position, std::size_t head, std::size_t which, std::size_t d) {
      const auto at =
          static_cast<std::ptrdiff_t>(b) * (sink_columns + world.ring) + paged::block_column(position, shape.sink, world.ring);
      const auto block = static_cast<std::size_t>(world.block_table[static_cast<std::size_t>(at)]);
      return world.blocks[(block * heads + head) * values + which * values / 2 +
                          paged::exact_index(static_cast<int>(dim), position % paged::kBlockTokens, static_cast<int>(d))];
    };
    for (int t = start; t < length; ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t d = 0; d < dim; ++d) {
          in.k.push_back(row(t, h, 0, d));
          in.v.push_back(row(t, h, 1, d));
        }
      }
    }
    for (int t = 0; t < start; ++t) {
      if (t >= shape.sink && t <= start - shape.recent) continue;
      std::int32_t& block = in.block_table[b * size_of(columns) + size_of(paged::block_column(t, shape.sink, in.ring))];
      if (block < 0) {
        block = static_cast<std::int32_t>(in.blocks.size() / (heads * values));
        in.blocks.resize(in.blocks.size() + heads * values, kNan);
      }
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t which = 0; which < 2; ++which) {
          for (std::size_t d = 0; d < dim; ++d) {
            in.blocks[(static_cast<std::size_t>(block) * heads + h) * values + which * values / 2 +
                      paged::exact_index(static_cast<int>(dim), t % paged::kBlockTokens, static_cast<int>(d))] =
                row(t, h, which, d);
          }
        }
      }
    }
  }
  if (in.blocks.empty()) in.blocks.resize(heads * values, kNan);
  return in;
}

class OnDevice {
 public:
  OnDevice(const PagedWorld& world, const Inputs& in, std::size_t far_bytes, test::Wide wide,
           std::optional<cuda::PrefillKernel> kernel)
      : kernel_(kernel),
        tables_(test::on_device(world.spectral_tables(), world.int2_tables())),
        q_(in.q),
        k_(in.k),
        v_(in.v),
        blocks_(in.blocks),
        query_start_(in.query_start),
        lengths_(world.shape().lengths),
        page_table_(world.page_table, test::wide_pages(wide), first_page(world, far_bytes)),
        block_table_(in.block_table, test::wide_blocks(wide)),
        sinks_(world.sinks) {
    const std::size_t page_bytes = world.layout().page_bytes;
    const std::int32_t first = first_page(world, far_bytes);
    pages_ = DeviceArray<std::uint8_t>(static_cast<std::size_t>(first) * page_bytes + world.pages.size());
    check(cudaMemcpy(pages_.data() + static_cast<std::size_t>(first) * page_bytes, world.pages.data(), world.pages.size(),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
    out_ = DeviceArray<std::uint16_t>(in.q.size());
    lse_ = DeviceArray<float>(in.q.size() / size_of(world.layout().head_dim));
    args_.layer = &tables_->view();
    args_.batch = static_cast<int>(world.shape().lengths.size());
    args_.n_tokens = in.query_start.back();
    args_.group = world.shape().group;
    args_.sink = world.shape().sink;
    args_.recent = world.shape().recent;
    args_.scale = world.scale();
    args_.soft_cap = world.shape().soft_cap;
    args_.q = q_.data();
    args_.k = k_.data();
    args_.v = v_.data();
    args_.query_start = query_start_.data();
    args_.lengths = lengths_.data();
    args_.pages = pages_.data();
    args_.page_table = page_table_.table();
    args_.page_columns = world.page_columns;
    args_.blocks = blocks_.data();
    args_.block_table = block_table_.table();
    args_.ring = in.ring;
    args_.sinks = world.sinks.empty() ? nullptr : sinks_.data();
    args_.out = out_.data();
    args_.lse = lse_.data();
  }

  // The output is poisoned first.
  void run() {
    check(cudaMemsetAsync(out_.data(), 0xFF, out_.size() * 2, nullptr), "cudaMemset");
    check(cudaMemsetAsync(lse_.data(), 0xFF, lse_.size() * 4, nullptr), "cudaMemset");
    cuda::prefill_with(kernel_, args_, nullptr);
  }
  [[nodiscard]] std::vector<std::uint16_t> out() const { return out_.download(); }
  [[nodiscard]] std::vector<float> lse() const { return lse_.download(); }

 private:
  static std::int32_t first_page(const PagedWorld& world, std::size_t far_bytes) {
    const std::size_t page_bytes = world.layout().page_bytes;
    return static_cast<std::int32_t>((far_bytes + page_bytes - 1) / page_bytes);
  }

  std::optional<cuda::PrefillKernel> kernel_;
  std::unique_ptr<cuda::LayerTables> tables_;
  DeviceArray<std::uint16_t> q_, k_, v_, blocks_, out_;
  DeviceArray<std::int32_t> query_start_, lengths_;
  test::DeviceIds page_table_, block_table_;
  DeviceArray<std::uint8_t> pages_;
  DeviceArray<float> sinks_, lse_;
  cuda::PrefillArgs args_;
};

struct Errors {
  double all = 0, worst_row = 0, lse = 0;
  int bad_rows = 0;    // off by more than a hundredth
  bool wrong = false;  // NaN
};

Errors compare(const PagedWorld& world, const Inputs& in, const std::vector<std::uint16_t>& out,
               const std::vector<float>& lse) {
  const paged::DecodeProblem problem = world.problem();
  const int heads = world.layout().n_head_kv * problem.group;
  const std::size_t dim = size_of(world.layout().head_dim);
  std::vector<std::size_t> chosen;  // rows: token * heads + head
  const std::size_t n_rows = lse.size();
  // A stride without a common divisor with heads and groups.
  std::size_t stride = std::max<std::size_t>(1, n_rows / kMostRows);
  while (stride > 1 && (stride % 2 == 0 || stride % 3 == 0 || stride % 7 == 0)) ++stride;
  for (std::size_t r = 0; r < n_rows; r += stride) chosen.push_back(r);
  std::vector<paged::DecodeRow> rows(chosen.size());
  std::vector<int> sequence(chosen.size()), query(chosen.size());
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto token = static_cast<std::int32_t>(chosen[i] / size_of(heads));
    const auto after = std::upper_bound(in.query_start.begin(), in.query_start.end(), token);
    sequence[i] = static_cast<int>(after - in.query_start.begin()) - 1;
    query[i] = problem.queries - (*after - token);
  }
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (std::size_t r = next++; r < rows.size(); r = next++)
        rows[r] = paged::decode_reference(problem, sequence[r], static_cast<int>(chosen[r] % size_of(heads)), query[r]);
    });
  }
  for (std::thread& t : threads) t.join();

  Errors e;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint16_t* got_row = out.data() + chosen[i] * dim;
    double row_difference = 0, row_norm = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double got = half_to_float(got_row[d]);
      const double want = rows[i].out[d];
      row_difference += (got - want) * (got - want);
      row_norm += want * want;
    }
    difference += row_difference;
    norm += row_norm;
    const float got_lse = lse[chosen[i]];
    if (!std::isfinite(row_difference) || !std::isfinite(got_lse)) e.wrong = true;
    if (!(row_difference <= 1e-4 * row_norm) && ++e.bad_rows <= 4) {
      std::printf(
          "  sequence %d (%d tokens), query %d of %d, head %d: relative error %.2e, lse %.4f for %.4f, values %.4f %.4f %.4f "
          "for %.4f %.4f %.4f\n",
          sequence[i], problem.lengths[sequence[i]], query[i], problem.queries, static_cast<int>(chosen[i] % size_of(heads)),
          std::sqrt(row_difference / row_norm), got_lse, rows[i].lse, half_to_float(got_row[0]), half_to_float(got_row[1]),
          half_to_float(got_row[dim - 1]), rows[i].out[0], rows[i].out[1], rows[i].out.back());
    }
    if (row_norm > 0) e.worst_row = std::max(e.worst_row, std::sqrt(row_difference / row_norm));
    e.lse = std::max(e.lse, std::abs(static_cast<double>(got_lse) - rows[i].lse));
  }
  e.all = norm > 0 ? std::sqrt(difference / norm) : 0;
  return e;
}

bool run_case(const Case& c, bool quick) {
  const test::RandomLayer layer(c.int2, c.dim, c.slots, c.mean, c.values_mean, 7);
  WorldShape shape = c.shape;
  shape.queries = *std::max_element(c.chunks.begin(), c.chunks.end());
  const PagedWorld world = layer.world(shape, 11);
  const Inputs in = inputs_of(world, c.chunks);
  OnDevice device(world, in, c.far_bytes, c.wide, c.portable ? std::optional(cuda::PrefillKernel::portable) : std::nullopt);
  device.run();
  check(cudaDeviceSynchronize(), c.name);
  const std::vector<std::uint16_t> out = device.out();
  const std::vector<float> lse = device.lse();
  const Errors e = compare(world, in, out, lse);
  // What the reference did not compute is finite at least.
  const bool finite = std::all_of(out.begin(), out.end(), [](std::uint16_t x) { return (x & 0x7C00U) != 0x7C00U; });
  bool same = true;
  for (int i = 0; i < (quick ? 1 : 25) && same; ++i) {
    device.run();
    check(cudaDeviceSynchronize(), c.name);
    const std::vector<float> again = device.lse();
    same = device.out() == out && std::memcmp(again.data(), lse.data(), lse.size() * 4) == 0;
  }
  const bool good = finite && !e.wrong && e.all <= kMostError && e.all >= kLeastError && e.lse < kMostLse && same;
  std::printf("%-40s L2 %.2e  worst row %.2e  lse %.1e  repeats %s  %s\n", c.name, e.all, e.worst_row, e.lse,
              same ? "equal" : "DIFFER", good ? "ok" : "FAILED");
  std::fflush(stdout);
  return good;
}

std::vector<Case> cases(bool quick) {
  const std::vector<int> eight = {128, 128, 128, 128, 128, 128, 128, 128};
  const std::vector<int> uneven = {32, 240, 144, 96};
  std::vector<Case> list;
  // Sequences of the given prefixes and chunks.
  const auto add = [&](const char* name, int dim, std::vector<int> slots, double mean, WorldShape shape,
                       const std::vector<int>& prefixes, std::vector<int> chunks, std::size_t far = 0) {
    for (std::size_t i = 0; i < prefixes.size(); ++i) shape.lengths.push_back(prefixes[i] + chunks[i]);
    list.push_back({name, dim, std::move(slots), mean, std::move(shape), std::move(chunks), far});
  };
  add("D 128, no prefix", 128, {128}, 0, {4}, {0, 0, 0, 0}, {1, 17, 64, 100});
  add("D 128, one prefix page, no mean", 128, {128}, 0, {4}, {400}, {17});
  add("D 128, window borders", 128, {128, 80}, 1, {4}, {1, 63, 64, 65, 319, 320, 321}, {17, 64, 1, 5, 17, 64, 3});
  add("D 64, uneven heads, mean", 64, {16, 112, 64}, 1, {3, 16, 40}, {700, 0, 97, 1000}, {17, 30, 64, 1});
  add("D 128, a head without slots", 128, {0, 128}, 1, {4}, {321, 700}, {17, 3});
  add("D 128, group 8, mean, sink logits", 128, uneven, 1, {8, 64, 256, {}, 0, true}, {650, 333}, {17, 40});
  add("D 128, group 7, soft cap", 128, {128, 96}, 1, {7, 64, 256, {}, 0, false, 1, 2.5F}, {400, 3}, {64, 20});
  add("D 128, ids of 64 bits", 128, uneven, 1, {4}, {650, 333, 0}, {17, 64, 3});
  list.back().wide = test::Wide::both;
  // Those of the portable kernel alone.
  const auto add_int2 = [&](const char* name, int dim, int heads, double mean, WorldShape shape, bool values_mean,
                            const std::vector<int>& prefixes, std::vector<int> chunks, std::size_t far = 0) {
    add(name, dim, std::vector<int>(size_of(heads), dim), mean, std::move(shape), prefixes, std::move(chunks), far);
    list.back().int2 = true;
    list.back().values_mean = values_mean;
  };
  const auto add_portable = [&](const char* name, int dim, std::vector<int> slots, double mean, WorldShape shape,
                                const std::vector<int>& prefixes, std::vector<int> chunks, std::size_t far = 0) {
    add(name, dim, std::move(slots), mean, std::move(shape), prefixes, std::move(chunks), far);
    list.back().portable = true;
  };
  add_int2("int2, D 128, window borders", 128, 2, 0, {4}, false, {1, 64, 319, 320, 321}, {17, 1, 17, 64, 3});
  add_int2("int2, D 64, group 3, both means", 64, 2, 1, {3, 16, 40, {}, 0, true}, true, {400, 0, 97}, {17, 30, 1});
  add_int2("int2, D 256, mean, soft cap", 256, 1, 1, {2, 64, 256, {}, 0, false, 1, 2.5F}, true, {500}, {20});
  add("D 256, no mean", 256, {256}, 0, {4}, {400}, {17});
  add("D 256, uneven heads, mean, sink logits", 256, {80, 304}, 1, {2, 16, 40, {}, 0, true}, {300, 3}, {20, 9});
  add_portable("D 128, portable, window borders", 128, {128, 80}, 1, {4}, {1, 63, 65, 319, 320, 321}, {17, 64, 5, 17, 64, 3});
  if (quick) return list;
  add("D 128, all prefixes, chunks of 333", 128, {128, 112}, 1, {4}, {0, 1, 63, 64, 65, 319, 320, 321, 5000},
      std::vector<int>(9, 333));
  add("D 128, all prefixes, chunks of 64", 128, {128, 112}, 0, {4}, {0, 1, 63, 64, 65, 319, 320, 321, 5000},
      std::vector<int>(9, 64));
  add("D 128, one chunk of 333", 128, eight, 1, {4}, {5000}, {333});
  add("D 128, one chunk of 333, no mean", 128, eight, 0, {4}, {5000}, {333});
  add("D 128, chunk of 1500", 128, {128, 128}, 1, {4}, {2000}, {1500});
  add("D 128, chunk of 1500, no prefix", 128, {128, 128}, 1, {2}, {0}, {1500});
  add("D 128, large mean", 128, {128, 128}, 10, {4}, {9000, 5000}, {70, 333});
  add("D 128, 60000 tokens", 128, {128, 128}, 1, {1}, {60000}, {130});
  add("D 128, uneven heads", 128, uneven, 1, {4}, {3000, 401}, {333, 64});
  add("D 128, heads of up to 368 slots", 128, {368, 16, 128}, 1, {4}, {3000, 401}, {333, 64});
  add("D 128, group 1", 128, {128, 112}, 1, {1}, {5000, 3}, {333, 17});
  add("D 128, group 16, ragged", 128, {128, 112}, 1, {16}, {5000, 3, 321, 64}, {333, 17, 1, 64});
  add("D 128, group 7, no mean", 128, {112, 128}, 0, {7}, {5000, 300}, {333, 64});
  add("D 128, batch of 40, ragged", 128, {128, 96}, 1, {4}, std::vector<int>(40, 600),
      {1, 17, 64, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1, 1,  1, 1,
       1, 2,  3,  4, 5, 6, 7, 8, 9, 10, 0,  0,  0,  4,  5,  6,  7, 99, 9, 10});
  add("D 64, chunk of 333", 64, {64, 48}, 1, {4}, {5000, 321}, {333, 333});
  add("D 64, group 7, no mean", 64, {64, 48}, 0, {7}, {5000, 321}, {333, 64});
  add("D 64, group 16, soft cap", 64, {64, 48}, 1, {16, 64, 256, {}, 0, false, 1, 1.5F}, {5000}, {64});
  add("D 128, no sink, recent 1", 128, {128, 96}, 0, {1, 0, 1}, {700, 4}, {64, 17});
  add("D 128, no sink, recent 1, long chunk", 128, {128, 96}, 1, {4, 0, 1}, {700}, {600});
  add("D 128, pages past 2^32 bytes", 128, eight, 0, {4}, {3000, 2000}, {17, 333}, 5'000'000'000);
  add_int2("int2, D 128, all prefixes", 128, 2, 1, {4}, false, {0, 1, 63, 64, 65, 319, 320, 321, 5000},
           std::vector<int>(9, 333));
  add_int2("int2, D 128, batch of 17, ragged", 128, 8, 0, {4}, true,
           {0, 1, 63, 64, 65, 320, 321, 640, 1000, 1001, 1500, 2000, 2001, 2047, 2048, 2049, 3000},
           {1, 5, 64, 63, 65, 0, 100, 1, 17, 333, 2, 3, 4, 0, 7, 90, 64});
  add_int2("int2, D 128, group 16, sink logits", 128, 2, 1, {16, 64, 256, {}, 0, true}, true, {5000, 3}, {333, 17});
  add_int2("int2, D 64, group 7, soft cap", 64, 3, 1, {7, 64, 256, {}, 0, false, 1, 1.5F}, true, {5000, 400}, {64, 100});
  add_int2("int2, D 256, long", 256, 2, 1, {8}, true, {6000, 401}, {333, 64});
  add_int2("int2, D 128, no sink, recent 1", 128, 2, 0, {4, 0, 1}, false, {700, 4}, {600, 17});
  add_int2("int2, D 128, pages past 2^32 bytes", 128, 8, 0, {4}, false, {3000, 2000}, {17, 333}, 5'000'000'000);
  add("D 256, all prefixes", 256, {256, 240}, 1, {4}, {0, 1, 63, 64, 65, 319, 320, 321, 5000}, std::vector<int>(9, 100));
  add("D 256, chunk of 1500, no mean", 256, {256, 304}, 0, {2}, {2000}, {1500});
  add("D 256, group 16, soft cap", 256, {128, 256}, 1, {16, 64, 256, {}, 0, false, 1, 2.5F}, {5000, 3}, {64, 100});
  add("D 256, 60000 tokens", 256, {256}, 1, {1}, {60000}, {70});
  add_portable("D 128, portable, all prefixes", 128, {128, 112}, 1, {4}, {0, 1, 63, 64, 65, 319, 320, 321, 5000},
               std::vector<int>(9, 333));
  add_portable("D 128, portable, chunk of 1500", 128, {128, 128}, 1, {4}, {2000}, {1500});
  add_portable("D 128, portable, large mean", 128, {128, 128}, 10, {4}, {9000, 5000}, {70, 333});
  add_portable("D 128, portable, 60000 tokens", 128, {128, 128}, 1, {1}, {60000}, {130});
  add_portable("D 128, portable, group 16, ragged", 128, uneven, 1, {16, 64, 256, {}, 0, true}, {5000, 3, 321, 64},
               {333, 17, 1, 64});
  add_portable("D 64, portable, group 7, soft cap", 64, {64, 48}, 1, {7, 64, 256, {}, 0, false, 1, 1.5F}, {5000, 321},
               {333, 64});
  add_portable("D 128, portable, no sink, recent 1", 128, {128, 96}, 1, {4, 0, 1}, {700}, {600});
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
      // Where there is no other kernel than the portable one, all cases are its own.
      if (c.portable && cuda::current_device().major != 9) continue;
      if (std::string(c.name).find(only) != std::string::npos) failed += static_cast<int>(!run_case(c, quick));
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "prefill_check: error: %s\n", e.what());
    return 1;
  }
  std::printf("%s\n", failed == 0 ? "all cases agree with the reference" : "SOME CASES FAILED");
  return failed == 0 ? 0 : 1;
}

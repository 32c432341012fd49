// Times AttentionJob on a warm cache: decode (1 query token) and prefill (512) at several depths, shapes and thread counts.
// One aligned line per case:
//   heads/kv/dim  mode  mean  tokens  n_kv  threads  us (best of the runs)  spread (median / best)  cycles per key and query
//   head [prefill: multiply-adds per cycle and thread; 16 is the peak of two 8-lane FMA pipes]
// "keys" of a prefill are the visible ones. Cycles use the clock measured at start (latency-1 additions), so they are wrong
// if the clock changes during the run.
//
//   attention_bench [--threads N,...] [--seconds S] [--filter TEXT]
#include <fmt/format.h>

#include <Eigen/QR>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oscar/attention/attention.h"
#include "oscar/base/error.h"
#include "oscar/cache/kv_cache.h"
#include "oscar/codec/int2.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Of all threads: what counts on a machine that is not quiet.
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double measure_hertz() {
  double best = 0.0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    constexpr int kSteps = 2'000'000;
    std::uint64_t x = static_cast<std::uint64_t>(repeat);
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) {
      x += static_cast<std::uint64_t>(i) ^ x;
      asm volatile("" : "+r"(x));
    }
    best = std::max(best, 2.0 * kSteps / seconds_since(start));  // xor, then add: two dependent cycles
  }
  return best;
}

struct Case {
  int n_head, n_head_kv, dim;
  bool coded;
  bool rope_mean;
  std::int64_t n_tokens, n_kv;
};

float normal(std::mt19937& rng) { return std::normal_distribution<float>(0.0F, 1.0F)(rng); }

oscar::MatrixF random_rotation(int dim, std::mt19937& rng) {
  oscar::MatrixD m(dim, dim);
  for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = static_cast<double>(normal(rng));
  const oscar::MatrixD q = Eigen::HouseholderQR<oscar::MatrixD>(m).householderQ() * oscar::MatrixD::Identity(dim, dim);
  return q.cast<float>();
}

std::unique_ptr<oscar::KvCache> make_cache(const Case& c, std::mt19937& rng) {
  oscar::RopeParams params;
  params.pairing = oscar::RopePairing::neox;
  params.n_rot = c.dim;
  oscar::LayerSpec spec;
  spec.n_head_kv = c.n_head_kv;
  spec.k_dim = spec.v_dim = c.dim;
  spec.rope = oscar::Rope(params, c.dim);
  if (c.coded) {
    oscar::Int2Config config;
    config.n_head_kv = c.n_head_kv;
    config.head_dim = c.dim;
    config.rotation.push_back(random_rotation(c.dim, rng));
    spec.v = oscar::make_int2_codec(config);
    if (c.rope_mean) {
      config.mean_pre_rope = oscar::MatrixF::Constant(c.n_head_kv, c.dim, 0.5F);
      config.rope = spec.rope;
    }
    spec.k = oscar::make_int2_codec(config);
  }
  auto cache = std::make_unique<oscar::KvCache>(c.n_kv, oscar::Windows{}, std::vector<oscar::LayerSpec>{spec});
  std::vector<float> row(static_cast<std::size_t>(c.n_head_kv * c.dim));
  for (std::int64_t begin = 0; begin < c.n_kv;) {
    // The last batch is the one whose queries are timed.
    const std::int64_t end = (begin < c.n_kv - c.n_tokens) ? std::min(begin + 512, c.n_kv - c.n_tokens) : c.n_kv;
    std::vector<std::int64_t> cells;
    std::vector<std::int32_t> positions;
    for (std::int64_t cell = begin; cell < end; ++cell) {
      cells.push_back(cell);
      positions.push_back(static_cast<std::int32_t>(cell));
    }
    cache->place(cells, positions, std::vector<oscar::SeqId>(cells.size(), 0));
    for (const std::int64_t cell : cells) {
      for (float& x : row) x = normal(rng);
      cache->write_k(0, cell, row);
      for (float& x : row) x = normal(rng);
      cache->write_v(0, cell, row);
    }
    begin = end;
  }
  return cache;
}

void run_case(const Case& c, const std::vector<int>& thread_counts, double budget, double hertz) {
  std::mt19937 rng(1);
  const auto cache = make_cache(c, rng);
  std::vector<float> q(static_cast<std::size_t>(c.n_tokens * c.n_head * c.dim));
  for (float& x : q) x = normal(rng);
  std::vector<float> out(q.size());
  std::vector<std::int32_t> positions;
  std::vector<std::uint16_t> mask(static_cast<std::size_t>(c.n_tokens * c.n_kv), 0xFC00);
  double keys = 0.0;
  for (std::int64_t t = 0; t < c.n_tokens; ++t) {
    const std::int64_t position = c.n_kv - c.n_tokens + t;
    positions.push_back(static_cast<std::int32_t>(position));
    std::fill_n(mask.begin() + t * c.n_kv, position + 1, std::uint16_t{0});
    keys += static_cast<double>(position + 1);
  }
  oscar::AttentionArgs args;
  args.cache = cache.get();
  args.n_kv = c.n_kv;
  args.n_head = c.n_head;
  args.n_tokens = c.n_tokens;
  args.positions = positions.data();
  args.q = q.data();
  args.out = out.data();
  args.q_head_stride = args.out_head_stride = c.dim;
  args.q_token_stride = args.out_token_stride = static_cast<std::int64_t>(c.n_head) * c.dim;
  args.mask = mask.data();
  args.mask_token_stride = c.n_kv;
  args.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));

  oscar::AttentionJob job;
  for (const int n_threads : thread_counts) {
    std::vector<double> times;
    double cpu = 1e9;
    const auto start = Clock::now();
    while (times.size() < 3 || (seconds_since(start) < budget && times.size() < 2000)) {
      // Helper threads start before the clock does; a host's pool is already running.
      std::atomic<int> ready{0};
      std::atomic<bool> go{false};
      std::vector<std::thread> threads;
      for (int t = 1; t < n_threads; ++t) {
        threads.emplace_back([&, t] {
          ready.fetch_add(1);
          while (!go.load()) std::this_thread::yield();
          job.run(t);
        });
      }
      while (ready.load() != n_threads - 1) std::this_thread::yield();
      const double cpu_begin = cpu_seconds();
      const auto begin = Clock::now();
      job.prepare(args, n_threads);
      go.store(true);
      job.run(0);
      for (std::thread& thread : threads) thread.join();
      times.push_back(seconds_since(begin));
      cpu = std::min(cpu, cpu_seconds() - cpu_begin);
    }
    std::sort(times.begin(), times.end());
    const double best = times.front();
    const double cycles = cpu * hertz / (keys * c.n_head);
    fmt::print("{:>2}/{}/{:<3}  {:5}  {:4}  {:>4}  {:>6}  {}  {:>9.1f} us  x{:<5.2f}  {:>7.1f} cycles", c.n_head, c.n_head_kv,
               c.dim, c.coded ? "coded" : "exact", c.rope_mean ? "rope" : "none", c.n_tokens, c.n_kv, n_threads, best * 1e6,
               times[times.size() / 2] / best, cycles);
    if (c.n_tokens > 1) fmt::print("  {:>5.2f} madd/cycle", 2.0 * c.dim / cycles);
    fmt::print("\n");
    std::fflush(stdout);
  }
}

std::vector<int> parse_counts(const std::string& text) {
  std::vector<int> counts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    counts.push_back(std::stoi(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return counts;
}

int bench(const std::vector<std::string>& arguments) {
  std::vector<int> threads = {1, 2};
  double budget = 0.5;
  std::string filter;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    if (i + 1 == arguments.size()) oscar::fail("{} needs a value", arguments[i]);
    const std::string& value = arguments[i + 1];
    if (arguments[i] == "--threads") {
      threads = parse_counts(value);
    } else if (arguments[i] == "--seconds") {
      budget = std::stod(value);
    } else if (arguments[i] == "--filter") {
      filter = value;
    } else {
      oscar::fail("unknown option {}; known: --threads, --seconds, --filter", arguments[i]);
    }
  }
  const double hertz = measure_hertz();
  fmt::print("path {}, {:.2f} GHz\n", oscar::cpu_path(), hertz * 1e-9);
  for (const auto& [n_head, n_head_kv, dim] : {std::tuple{9, 3, 64}, std::tuple{14, 2, 64}, std::tuple{12, 2, 128}}) {
    for (const std::int64_t n_tokens : {1, 512}) {
      for (const std::int64_t n_kv : {2048, 4096, 8192}) {
        for (int kind = 0; kind < 3; ++kind) {
          const Case c{n_head, n_head_kv, dim, kind > 0, kind > 1, n_tokens, n_kv};
          const std::string name = fmt::format("{}/{}/{} {} {} {} {}", n_head, n_head_kv, dim, c.coded ? "coded" : "exact",
                                               c.rope_mean ? "rope" : "none", n_tokens, n_kv);
          if (name.find(filter) != std::string::npos) run_case(c, threads, budget, hertz);
        }
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return bench({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "attention_bench: error: {}\n", error.what());
    return 1;
  }
}

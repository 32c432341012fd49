// Times of launches as CUDA-graph replays, and the rate of a device copy, for all benchmarks of device kernels.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <future>
#include <random>
#include <vector>

#include "cuda/runtime.h"
#include "fill.h"

namespace oscar::bench {

using cuda::check;
using cuda::DeviceArray;

inline constexpr std::size_t kTouched = 600'000'000;  // ten times the L2 of an H200
inline constexpr int kReplays = 15;

class Stream {
 public:
  Stream() { check(cudaStreamCreate(&stream_), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Of the first GPU, as nvidia-smi tells; zeros where it does not.
struct GpuState {
  double sm_clock_mhz = 0, power_w = 0;
};
inline GpuState gpu_state() {
  GpuState state;
  std::FILE* told = popen("nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits 2>/dev/null", "r");
  if (told == nullptr) return state;
  if (std::fscanf(told, "%lf , %lf", &state.sm_clock_mhz, &state.power_w) != 2) state = {};
  pclose(told);
  return state;
}

struct Times {
  double median, low, high;  // microseconds of one launch
  GpuState state;            // during a sustained run; bursts are too short
};

// Times `launch(i)`, i = 0 .. launches - 1, as one graph.
inline Times time_graph(int launches, const std::function<void(int, cudaStream_t)>& launch, double sustained_seconds = 0) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < launches; ++i) launch(i, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto replay = [&] {
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "a graph");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(ms) / launches;
  };
  for (int i = 0; i < 3; ++i) replay();
  std::vector<double> us;
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::future<GpuState> state;
  while (us.size() < kReplays || passed() < sustained_seconds) {
    us.push_back(replay());
    if (!state.valid() && sustained_seconds > 0 && passed() > sustained_seconds / 2) state = std::async(gpu_state);
  }
  if (sustained_seconds > 0) us.erase(us.begin(), us.end() - static_cast<std::ptrdiff_t>(us.size() / 3));  // the last third
  std::sort(us.begin(), us.end());
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return {us[us.size() / 2], us.front(), us.back(), state.valid() ? state.get() : GpuState()};
}

// Bytes per microsecond of a device copy, read and written.
inline double copy_rate() {
  const std::size_t bytes = std::size_t{1} << 30;
  const DeviceArray<std::uint8_t> from(2 * bytes);
  const DeviceArray<std::uint8_t> to(2 * bytes);
  check(cudaMemset(from.data(), 0x5A, 2 * bytes), "cudaMemset");
  const Times t = time_graph(4, [&](int i, cudaStream_t stream) {
    const std::size_t at = static_cast<std::size_t>(i % 2) * bytes;
    copy(to.data() + at, from.data() + at, bytes, stream);
  });
  return 2.0 * static_cast<double>(bytes) / t.median;
}

inline std::vector<std::int32_t> shuffled(std::size_t n, std::mt19937& rng) {
  std::vector<std::int32_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = static_cast<std::int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), rng);
  return ids;
}

}  // namespace oscar::bench

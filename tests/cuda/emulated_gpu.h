// Kernels without a GPU: what they use of CUDA C++ and its runtime, on the CPU. For one source file of a program, before the
// kernels. Device memory is host memory; the threads of a block are coroutines that hand over at barriers and warp votes, so a
// block runs in one thread and always in the same order. Races between threads do not show here: compute-sanitizer looks for
// them.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numbers>
#include <utility>
#include <vector>

namespace {

constexpr int kWarp = 32;
using Words = std::array<std::uint32_t, 6>;  // that a lane tells the others of its warp at once

// Those who wait for each other.
struct Meeting {
  int size = 0, arrived = 0, number = 0;
  // By the lanes of a warp, in turns: nobody speaks twice again before all have heard what was said once before.
  std::array<std::array<Words, kWarp>, 2> said{};
};

class Block {
 public:
  static Block& running() { return *instance_; }

  template <class Kernel>
  Block(int threads, unsigned index, unsigned blocks, Kernel&& kernel)
      : index_{index, 0, 0}, blocks_(blocks), stacks_(static_cast<std::size_t>(threads)), contexts_(stacks_.size()) {
    instance_ = this;
    all_.size = threads;
    warps_.resize(stacks_.size() / kWarp);
    for (Meeting& w : warps_) w.size = kWarp;
    run_ = kernel;
    left_ = threads;
    for (std::size_t i = 0; i < stacks_.size(); ++i) {
      stacks_[i].reset(new char[kStack]);
      getcontext(&contexts_[i]);
      contexts_[i].uc_stack.ss_sp = stacks_[i].get();
      contexts_[i].uc_stack.ss_size = kStack;
      contexts_[i].uc_link = &scheduler_;
      makecontext(
          &contexts_[i], [] { instance_->run_(), instance_->finish(); }, 0);
    }
    done_.assign(stacks_.size(), false);
    thread_ = 0;
    swapcontext(&scheduler_, &contexts_[0]);  // comes back when all are done
  }

  [[nodiscard]] uint3 thread() const { return {static_cast<unsigned>(thread_), 0, 0}; }
  [[nodiscard]] uint3 index() const { return index_; }
  [[nodiscard]] unsigned blocks() const { return blocks_; }
  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(stacks_.size()); }
  [[nodiscard]] std::size_t lane() const { return thread_ % kWarp; }
  void meet_all() { meet(all_); }
  void meet_first(int threads) {
    first_.size = threads;
    meet(first_);
  }
  void meet_warp() { meet(warps_[thread_ / kWarp]); }
  // What all lanes of the warp say.
  const std::array<Words, kWarp>& exchange(const Words& words) {
    Meeting& warp = warps_[thread_ / kWarp];
    auto& said = warp.said[static_cast<std::size_t>(warp.number % 2)];
    said[lane()] = words;
    meet(warp);
    return said;
  }

 private:
  static constexpr std::size_t kStack = 64 << 10;
  static Block* instance_;

  void meet(Meeting& m) {
    const int number = m.number;
    if (++m.arrived == m.size) {
      m.arrived = 0;
      ++m.number;
      return;
    }
    while (m.number == number) {
      ucontext_t& here = contexts_[thread_];
      next_thread();
      swapcontext(&here, &contexts_[thread_]);
    }
  }
  void next_thread() {
    do {
      thread_ = thread_ + 1 == stacks_.size() ? 0 : thread_ + 1;
    } while (done_[thread_]);
  }
  void finish() {
    done_[thread_] = true;
    if (--left_ == 0) return;
    next_thread();
    setcontext(&contexts_[thread_]);
  }

  uint3 index_;
  unsigned blocks_;
  void (*run_)() = nullptr;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<ucontext_t> contexts_;
  ucontext_t scheduler_{};
  std::vector<bool> done_;
  std::size_t thread_ = 0;
  int left_ = 0;
  Meeting all_, first_;
  std::vector<Meeting> warps_;
};
Block* Block::instance_ = nullptr;

}  // namespace

// What kernels use of CUDA C++.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)
#undef __grid_constant__
#define __grid_constant__
#define threadIdx Block::running().thread()
#define blockIdx Block::running().index()
struct BlockDim {
  struct {
    operator unsigned() const { return Block::running().threads(); }
  } x;
};
struct GridDim {
  struct {
    operator unsigned() const { return Block::running().blocks(); }
  } x;
};
inline const BlockDim blockDim;
inline const GridDim gridDim;
inline void __syncthreads() { Block::running().meet_all(); }
inline void __syncwarp() { Block::running().meet_warp(); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const auto& votes = Block::running().exchange({vote ? 1U : 0U});
  unsigned bits = 0;
  for (unsigned i = 0; i < kWarp; ++i) bits |= votes[i][0] << i;
  return bits;
}
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }
template <class T>
T __shfl_sync(unsigned, T x, int from) {
  return std::bit_cast<T>(Block::running().exchange({std::bit_cast<std::uint32_t>(x)})[static_cast<std::size_t>(from)][0]);
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T x, int distance) {
  return __shfl_sync(lanes, x, static_cast<int>(Block::running().lane()) ^ distance);
}
template <class T>
T __shfl_up_sync(unsigned lanes, T x, int distance) {
  const int lane = static_cast<int>(Block::running().lane());
  return __shfl_sync(lanes, x, lane < distance ? lane : lane - distance);
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  unsigned sum = 0;
  for (const Words& words : Block::running().exchange({x})) sum += words[0];
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  unsigned most = 0;
  for (const Words& words : Block::running().exchange({x})) most = std::max(most, words[0]);
  return most;
}
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline void sincospif(float x, float* sine, float* cosine) {
  const double angle = std::numbers::pi * static_cast<double>(x);
  *sine = static_cast<float>(std::sin(angle));
  *cosine = static_cast<float>(std::cos(angle));
}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
inline void atomicAnd(unsigned* at, unsigned x) { *at &= x; }
inline void atomicOr(unsigned* at, unsigned x) { *at |= x; }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return std::exchange(*at, *at + x); }

extern "C" {
cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *p != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// The compute capability's major number; a program may ask for another one.
#ifndef OSCAR_EMULATED_MAJOR
#define OSCAR_EMULATED_MAJOR 9
#endif
// Few multiprocessors, so that warps have several pieces of work each.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* shared = std::getenv("OSCAR_EMULATED_SHARED");  // bytes, of a smaller GPU
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (shared != nullptr ? std::atoi(shared) : 232448)
           : attribute == cudaDevAttrComputeCapabilityMajor     ? OSCAR_EMULATED_MAJOR
                                                                : 3;
  return cudaSuccess;
}
}

// A stream that is captured keeps what is enqueued; a graph does it again.
using Graph = std::vector<std::function<void()>>;
inline Graph* captured = nullptr;
inline void enqueue(std::function<void()> work) {
  if (captured != nullptr) {
    captured->push_back(std::move(work));
  } else {
    work();
  }
}

extern "C" {
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  enqueue([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  captured = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  captured = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<Graph*>(executable)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
}

// Launches of one block after the other.
template <class Params>
struct Launch {
  static inline void (*kernel)(Params);
  static inline Params params;
  static void run(void (*k)(Params), unsigned blocks, unsigned threads, const Params& p) {
    enqueue([=] {
      kernel = k;
      params = p;
      for (unsigned i = 0; i < blocks; ++i) Block(static_cast<int>(threads), i, blocks, [] { kernel(params); });
    });
  }
};
template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  Launch<Params>::run(kernel, config->gridDim.x, config->blockDim.x, params);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

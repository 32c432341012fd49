// The append kernel without a GPU: this file stands in for append.cu and for the part of the CUDA runtime that an append uses.
// Device memory is host memory; the threads of a block are coroutines that hand over at barriers and warp votes, so a block
// runs in one thread and always in the same order. Races between threads do not show here: compute-sanitizer looks for them.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int kWarp = 32;

// Those who wait for each other.
struct Meeting {
  int size = 0, arrived = 0, number = 0;
  // By the lanes of a warp, in turns: nobody speaks twice again before all have heard what was said once before.
  std::array<std::array<std::uint32_t, kWarp>, 2> said{};
};

class Block {
 public:
  static Block& running() { return *instance_; }

  template <class Kernel>
  Block(int threads, uint3 index, Kernel&& kernel)
      : index_(index), stacks_(static_cast<std::size_t>(threads)), contexts_(stacks_.size()) {
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
    while (left_ > 0) {
      for (thread_ = 0; thread_ < stacks_.size(); ++thread_) {
        if (!done_[thread_]) swapcontext(&scheduler_, &contexts_[thread_]);
      }
    }
  }

  [[nodiscard]] uint3 thread() const { return {static_cast<unsigned>(thread_), 0, 0}; }
  [[nodiscard]] uint3 index() const { return index_; }
  [[nodiscard]] std::size_t lane() const { return thread_ % kWarp; }
  void meet_all() { meet(all_); }
  // What all lanes of the warp say.
  std::array<std::uint32_t, kWarp> exchange(std::uint32_t word) {
    Meeting& warp = warps_[thread_ / kWarp];
    auto& said = warp.said[static_cast<std::size_t>(warp.number % 2)];
    said[lane()] = word;
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
    while (m.number == number) swapcontext(&contexts_[thread_], &scheduler_);
  }
  void finish() {
    done_[thread_] = true;
    --left_;
  }

  uint3 index_;
  void (*run_)() = nullptr;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<ucontext_t> contexts_;
  ucontext_t scheduler_{};
  std::vector<bool> done_;
  std::size_t thread_ = 0;
  int left_ = 0;
  Meeting all_;
  std::vector<Meeting> warps_;
};
Block* Block::instance_ = nullptr;

}  // namespace

// What the kernel uses of CUDA C++.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define threadIdx Block::running().thread()
#define blockIdx Block::running().index()
static void __syncthreads() { Block::running().meet_all(); }
static unsigned __ballot_sync(unsigned, bool vote) {
  const auto votes = Block::running().exchange(vote ? 1U : 0U);
  unsigned bits = 0;
  for (unsigned i = 0; i < kWarp; ++i) bits |= votes[i] << i;
  return bits;
}
static bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }
static float __shfl_sync(unsigned, float x, int from) {
  return std::bit_cast<float>(Block::running().exchange(std::bit_cast<std::uint32_t>(x))[static_cast<std::size_t>(from)]);
}
static float __shfl_xor_sync(unsigned lanes, float x, int distance) {
  return __shfl_sync(lanes, x, static_cast<int>(Block::running().lane()) ^ distance);
}
static int __shfl_xor_sync(unsigned lanes, int x, int distance) {
  return std::bit_cast<int>(__shfl_xor_sync(lanes, std::bit_cast<float>(x), distance));
}
template <class T>
static T __ldg(const T* from) {
  return *from;
}
static int __popc(unsigned x) { return std::popcount(x); }
static float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static double __dmul_rn(double a, double b) { return a * b; }
static float __double2float_rn(double a) { return static_cast<float>(a); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static void atomicAnd(unsigned* at, unsigned x) { *at &= x; }
static void atomicOr(unsigned* at, unsigned x) { *at |= x; }

#include "cuda/append.cuh"

namespace oscar::cuda {

alignas(128) std::uint8_t append_shared[128 << 10];

namespace {

AppendParams current;

template <template <int, int> class Append, int D, int kRows>
void run(AppendParams& p) {
  p.tiles = (p.n_rows + kRows - 1) / kRows;
  current = p;
  for (int i = 0; i < p.tiles * p.layer.n_head_kv; ++i)
    Block(kAppendThreads, {static_cast<unsigned>(i), 0, 0}, [] { append_kernel<Append, D, kRows>(current); });
}
// Both kinds of tiles occur in the quick cases.
template <template <int, int> class Append, int D>
void choose(AppendParams& p) {
  p.n_rows < 17 ? run<Append, D, kSmallTile>(p) : run<Append, D, kLargeTile>(p);
}
template <template <int, int> class Append>
void choose_dim(AppendParams& p) {
  switch (p.layer.head_dim) {
    case 64:
      choose<Append, 64>(p);
      break;
    case 128:
      choose<Append, 128>(p);
      break;
    default:
      choose<Append, 256>(p);
  }
}

}  // namespace

cudaError_t launch_append(AppendParams& p, const DeviceLimits& /*device*/, cudaStream_t /*stream*/) {
  p.layer.codec == paged::PageCodec::int2 ? choose_dim<Int2Append>(p) : choose_dim<SpectralAppend>(p);
  return cudaSuccess;
}

}  // namespace oscar::cuda

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
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
}

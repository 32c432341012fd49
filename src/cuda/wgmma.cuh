// Warpgroup matrix products of sm_90a, and the barriers and copies that go with them, named by what they do.
//
// A tile in shared memory is [rows, 64] binary16, 128 bytes a row, 1024-byte aligned, its 16-byte piece c of row r stored as
// piece c xor (r mod 8) (the 128-byte swizzle); wider rows are several such tiles. A product takes A [64, 16] and B [N, 16]^T,
// both with the summed index along the row.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

__device__ __forceinline__ std::uint32_t swizzled(int row, int piece) {
  return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) * 16));
}

// Names 16 columns of a tile, from `address` on: 32 bytes further in the row are the next 16. Lower half of what the hardware
// wants; the upper half, the swizzle and the distance of eight rows, is the same for all tiles.
__device__ __forceinline__ std::uint32_t tile_descriptor(std::uint32_t address) {
  return (1U << 16) | ((address & 0x3FFFFU) >> 4);
}
// That of a place so many bytes further.
__device__ __forceinline__ std::uint32_t further(std::uint32_t descriptor, std::uint32_t bytes) {
  return descriptor + bytes / 16U;
}

#define OSCAR_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OSCAR_F16(d, i) OSCAR_F4(d, i), OSCAR_F4(d, i + 4), OSCAR_F4(d, i + 8), OSCAR_F4(d, i + 12)
#define OSCAR_D32 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define OSCAR_D64                                                                                                           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"    \
  "%61,%62,%63}"

// d [64, N] = a b + (more ? d : 0), N = 2 kSize; lanes hold it as they hold the accumulators of m16n8k16, warp w rows 16 w ..
__device__ __forceinline__ void group_mma(float (&d)[32], std::uint32_t a, std::uint32_t b, int more) {
  asm volatile(
      "{\n.reg .pred more;\n.reg .b64 a, b;\nsetp.ne.b32 more, %34, 0;\n"
      "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " OSCAR_D32 ", a, b, more, 1, 1, 0, 0;\n}\n"
      : OSCAR_F16(d, 0), OSCAR_F16(d, 16)
      : "r"(a), "r"(b), "r"(more));
}
__device__ __forceinline__ void group_mma(float (&d)[32], const std::uint32_t* a, std::uint32_t b, int more) {
  asm volatile(
      "{\n.reg .pred more;\n.reg .b64 b;\nsetp.ne.b32 more, %37, 0;\nmov.b64 b, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " OSCAR_D32 ", {%32,%33,%34,%35}, b, more, 1, 1, 0;\n}\n"
      : OSCAR_F16(d, 0), OSCAR_F16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(more));
}
__device__ __forceinline__ void group_mma(float (&d)[64], const std::uint32_t* a, std::uint32_t b, int more) {
  asm volatile(
      "{\n.reg .pred more;\n.reg .b64 b;\nsetp.ne.b32 more, %69, 0;\nmov.b64 b, {%68, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " OSCAR_D64 ", {%64,%65,%66,%67}, b, more, 1, 1, 0;\n}\n"
      : OSCAR_F16(d, 0), OSCAR_F16(d, 16), OSCAR_F16(d, 32), OSCAR_F16(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(more));
}
#undef OSCAR_F4
#undef OSCAR_F16
#undef OSCAR_D32
#undef OSCAR_D64

// Before the first product, and before one whose registers were written since.
__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kLeft commits are unfinished.
template <int kLeft>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving uses of registers across a wait.
template <int kSize>
__device__ __forceinline__ void pin(float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Stores of the calling thread to shared memory become visible to matrix products and bulk copies that a barrier orders later.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_matrix(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                             std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrix_transposed(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                                        std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_await(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra wait;\nfinished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// The same place in another block of the cluster.
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void barrier_arrive_in(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}
// By one thread. The barrier counts the bytes.
__device__ __forceinline__ void copy_to_shared(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_to_block(std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                                              std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Says that all lanes hold the same value.
template <class T>
__device__ __forceinline__ T same_in_warp(T x) {
  return __shfl_sync(~0U, x, 0);
}
// A barrier of `threads` threads of the block; number 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace oscar::cuda

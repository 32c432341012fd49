// Stands in for src/cuda/primitives.cuh where kernels run on the CPU, see emulated_gpu.h: the same functions, by what they do.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/dependent_launch.cuh"

namespace oscar::cuda {

// Shared addresses are offsets in it.
alignas(1024) inline std::uint8_t emulated_shared[256 << 10];

inline std::uint8_t* dynamic_shared() { return emulated_shared; }
inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(p) - emulated_shared);
}
template <class T>
T load_shared(std::uint32_t address) {
  if (address % sizeof(T) != 0 || address + sizeof(T) > sizeof emulated_shared) std::abort();
  T v;
  std::memcpy(&v, emulated_shared + address, sizeof v);
  return v;
}
template <class T>
void store_shared(std::uint32_t address, T v) {
  if (address % sizeof(T) != 0 || address + sizeof(T) > sizeof emulated_shared) std::abort();
  std::memcpy(emulated_shared + address, &v, sizeof v);
}
inline uint4 load_shared_16(std::uint32_t address) { return load_shared<uint4>(address); }
inline uint2 load_shared_8(std::uint32_t address) { return load_shared<uint2>(address); }
inline std::uint32_t load_shared_4(std::uint32_t address) { return load_shared<std::uint32_t>(address); }
inline float4 load_shared_float4(std::uint32_t address) { return load_shared<float4>(address); }
inline float load_shared_float(std::uint32_t address) { return load_shared<float>(address); }
inline void store_shared_float(std::uint32_t address, float v) { store_shared(address, v); }
inline void store_shared_float4(std::uint32_t address, float4 v) { store_shared(address, v); }
inline void store_shared_16(std::uint32_t address, uint4 v) { store_shared(address, v); }

// Of all bits of a half.
inline const std::vector<float> half_values = [] {
  std::vector<float> all(1U << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(i)));
  return all;
}();
inline float half_of(std::uint32_t word, int part) { return half_values[word >> (16 * part) & 0xFFFFU]; }

// d += a b, a [16, 16] and b [16, 8] binary16, d [16, 8] binary32. Lane 4 g + t has rows g and g + 8 of a and d and column g
// of b; columns 2 t, 2 t + 1 (and 2 t + 8, 2 t + 9) of a and d, such rows of b.
inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                std::uint32_t b1) {
  const auto& all = Block::running().exchange({a0, a1, a2, a3, b0, b1});
  const std::size_t g = Block::running().lane() / 4;
  const std::size_t t = Block::running().lane() % 4;
  for (std::size_t k = 0; k < 16; ++k) {
    const std::size_t from = k % 8 / 2;  // t of the lane that has it
    const std::size_t upper = k / 8;
    const int part = static_cast<int>(k % 2);
    for (std::size_t column = 0; column < 2; ++column) {
      const float b = half_of(all[4 * (2 * t + column) + from][4 + upper], part);
      d[column] += half_of(all[4 * g + from][2 * upper], part) * b;
      d[2 + column] += half_of(all[4 * g + from][2 * upper + 1], part) * b;
    }
  }
}
// d = a b + c, a [16, 32] unsigned bytes, b [32, 8] signed or unsigned ones, c and d of 32 bits. Lane 4 g + t has columns 4 t
// to 4 t + 3 and 4 t + 16 to 4 t + 19 of a, such rows of b.
template <bool kSigned>
void mma_bytes(std::uint32_t (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
               std::uint32_t b1, const std::uint32_t (&c)[4]) {
  const auto& all = Block::running().exchange({a0, a1, a2, a3, b0, b1});
  const std::size_t g = Block::running().lane() / 4;
  const std::size_t t = Block::running().lane() % 4;
  std::uint32_t sum[4] = {c[0], c[1], c[2], c[3]};
  for (std::size_t k = 0; k < 32; ++k) {
    const std::size_t from = k % 16 / 4;  // t of the lane that has it
    const std::size_t upper = k / 16;
    const std::size_t shift = 8 * (k % 4);
    for (std::size_t column = 0; column < 2; ++column) {
      const auto byte = static_cast<std::uint8_t>(all[4 * (2 * t + column) + from][4 + upper] >> shift);
      const auto b =
          static_cast<std::uint32_t>(kSigned ? static_cast<int>(static_cast<std::int8_t>(byte)) : static_cast<int>(byte));
      sum[column] += (all[4 * g + from][2 * upper] >> shift & 0xFFU) * b;
      sum[2 + column] += (all[4 * g + from][2 * upper + 1] >> shift & 0xFFU) * b;
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
inline void mma_bytes_16(std::uint32_t (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b0) {
  const std::uint32_t c[4] = {d[0], d[1], d[2], d[3]};
  mma_bytes<true>(d, a0, a1, 0, 0, b0, 0, c);
}
inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t both = a | static_cast<std::uint64_t>(b) << 32;
  std::uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    result |= static_cast<std::uint32_t>(both >> (8 * (selector >> (4 * i) & 7U)) & 0xFFU) << (8 * i);
  }
  return result;
}
// Four matrices of 8 rows of 16 bytes, whose addresses lanes 8 i .. 8 i + 7 have; a lane gets columns 2 t, 2 t + 1 of row g, or
// of the transposed matrix.
inline void load_matrices(std::uint32_t (&a)[4], std::uint32_t address, bool transposed) {
  const auto& all = Block::running().exchange({address});
  const auto g = static_cast<std::uint32_t>(Block::running().lane() / 4);
  const auto t = static_cast<std::uint32_t>(Block::running().lane() % 4);
  for (std::uint32_t i = 0; i < 4; ++i) {
    a[i] = 0;
    for (std::uint32_t part = 0; part < 2; ++part) {
      const std::uint32_t row = transposed ? 2 * t + part : g;
      const std::uint32_t column = transposed ? g : 2 * t + part;
      a[i] |= static_cast<std::uint32_t>(load_shared<std::uint16_t>(all[8 * i + row][0] + 2 * column)) << (16 * part);
    }
  }
  Block::running().meet_warp();
}
inline void load_matrix(std::uint32_t (&a)[4], std::uint32_t address) { load_matrices(a, address, false); }
inline void load_matrix_transposed(std::uint32_t (&a)[4], std::uint32_t address) { load_matrices(a, address, true); }
inline std::uint32_t transpose(std::uint32_t a) {
  const auto& all = Block::running().exchange({a});
  const std::size_t g = Block::running().lane() / 4;
  const std::size_t t = Block::running().lane() % 4;
  const auto half = [&](std::size_t row) { return all[4 * row + g / 2][0] >> (16 * (g % 2)) & 0xFFFFU; };
  return half(2 * t) | half(2 * t + 1) << 16;
}

inline std::uint32_t pack_half2(float low, float high) {
  return static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(low))) |
         static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}
inline float exp2_fast(float x) { return std::exp2(x); }

// Copies are there at once.
inline void copy_16_if(bool wanted, std::uint32_t to, const void* from) {
  store_shared(to, wanted ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0));
}
inline void copy_16(std::uint32_t to, const void* from) { copy_16_if(true, to, from); }
inline void copies_arrived() {}

template <class T>
T computed_anew(T x) {
  return x;
}
inline void fence_device() {}
// Blocks run one after the other: what one waits for must have been done.
inline void wait_until_set(const std::uint32_t* flag) {
  if (*flag == 0) std::abort();
}
inline void store_release(std::uint32_t* to, std::uint32_t v) { *to = v; }
inline void wait_for_threads(int threads) { Block::running().meet_first(threads); }
inline void wait_for_block() { Block::running().meet_all(); }

}  // namespace oscar::cuda

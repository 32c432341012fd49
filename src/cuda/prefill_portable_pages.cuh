// Pages of the portable prefill kernel: copies on their way to shared memory, and what all warps of the block need of a page
// besides its digits: factors of the tokens' columns, and the page's RoPE means.
#pragma once

#include "cuda/prefill_portable_memory.cuh"
#include "cuda/prefill_portable_products.cuh"
#include "cuda/rope_means.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

template <int D, bool kInt2>
class PortablePages {
  using Memory = PortableMemory<D, kInt2>;

 public:
  // coded_unit: what PortableQueries::transform() returned.
  __device__ PortablePages(const PrefillParams& p, const PrefillUnit& u, std::uint32_t shared, int slots, float coded_unit)
      : p_(p), u_(u), shared_(shared), slots_(slots), thread_(static_cast<int>(threadIdx.x)), next_(u.first_page) {
    const float unit = p.layer.n_pairs > 0 ? 0.5F * coded_unit : coded_unit;  // see add_means()
    if (thread_ == 0) store_shared_float(shared + Memory::kCodedUnit, unit);
    load_id();
  }

  // Shared addresses of a page's digits and of its table; number: how many came before.
  [[nodiscard]] __device__ std::uint32_t keys(int number) const {
    return shared_ + Memory::pages(slots_) + static_cast<std::uint32_t>(number % kPortablePages) * Memory::page_bytes(slots_);
  }
  [[nodiscard]] __device__ std::uint32_t values(int number) const { return keys(number) + paged::key_bytes(slots_); }
  [[nodiscard]] __device__ std::uint32_t table(int number) const {
    return shared_ + Memory::kTiers + static_cast<std::uint32_t>(number % 2) * Memory::kTable;
  }

  // Starts the copy of the next page, by all threads; which one of the sequence, negative: there is none.
  __device__ __forceinline__ int fetch(int number) {
    const int last = u_.last_page;
    if (next_ >= last) return -1;
    const int page = next_;
    const std::uint8_t* from = p_.pages + static_cast<std::int64_t>(id_) * p_.layer.page_bytes + p_.layer.head_offset[u_.kv];
    next_ = page_after(page, u_.first_page, last);
    if (next_ < last) load_id();
    const std::uint32_t to = keys(number);
    const auto bytes = static_cast<int>(Memory::page_bytes(slots_));
    for (int i = 16 * thread_; i < bytes; i += 16 * kPortableThreads) copy_16(to + static_cast<std::uint32_t>(i), from + i);
    return page;
  }

  // Table of a page that is there, by all threads; page: of the sequence.
  __device__ __forceinline__ void make_table(int number, int page) const {
    const int thread = computed_anew(thread_);
    const std::uint32_t to = table(number);
    const std::uint32_t row_data = values(number) + paged::value_bytes(D);
    const bool is_value = thread >= kPageTokens;
    const int column = thread % kPageTokens;
    const int group = column / 16;
    const int row = column % 16;
    const float coded_unit = load_shared_float(shared_ + Memory::kCodedUnit);
    const float key_unit = coded_unit * field_unit(group);
    const std::uint32_t at = to + 4U * static_cast<std::uint32_t>(thread);
    if constexpr (kInt2) {
      // Tokens that no query reads as codes may hold anything, NaN included.
      const int position = page * kPageTokens + tile_token(column);
      const bool read = position >= p_.sink && position <= u_.newest - p_.recent;
      const std::uint32_t grid = load_shared_4(row_data + static_cast<std::uint32_t>(is_value ? 4 * kPageTokens : 0) +
                                               static_cast<std::uint32_t>(4 * (4 * row + group)));
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&grid));
      const float step = read ? both.x : 0.0F;
      const float middle = read ? fmaf(1.5F, both.x, both.y) : 0.0F;  // of the codes, which are counted from there
      store_shared_float(at, is_value ? step : step * key_unit);
      store_shared_float(at + Memory::kOffsets, is_value ? middle : middle * coded_unit);
      const float most = warp_max(step);
      if (thread % 32 == 0) store_shared_float(to + Memory::kSteps + 4U * static_cast<std::uint32_t>(thread / 32), most);
    } else {
      const std::uint32_t four = load_shared_4(row_data + static_cast<std::uint32_t>((is_value ? kPageTokens : 0) + 4 * row));
      const std::uint32_t gain = four >> (8 * group) & (is_value ? paged::kValueGains - 1U : 0xFFU);
      const auto n = static_cast<float>(gain);
      const float factor = is_value ? exp2_fast((n - 40.0F) / 8.0F) : exp2_fast((n - 128.0F) / 16.0F) * key_unit;
      store_shared_float(at, gain == 0 ? 0.0F : factor);
    }
    // m e^(i theta middle) of pairs 2 i and 2 i + 1: real parts, imaginary parts.
    for (int i = thread; i < p_.layer.n_pairs; i += kPortableThreads) {
      const float2 by = turn_by(p_.layer.turns[i] * (page * kPageTokens + (kPageTokens - 1) / 2.0));
      const float2 m = __ldg(reinterpret_cast<const float2*>(p_.layer.mean) + u_.kv * p_.layer.n_pairs + i);
      const float scale = p_.scale * kLog2E;
      const std::uint32_t mean = to + Memory::kMeans + static_cast<std::uint32_t>(i / 2 * 16 + i % 2 * 4);
      store_shared_float(mean, (m.x * by.x - m.y * by.y) * scale);
      store_shared_float(mean + 8U, (m.x * by.y + m.y * by.x) * scale);
    }
  }

 private:
  __device__ __forceinline__ void load_id() { id_ = __ldg(p_.page_table.at(u_.sequence, p_.page_columns, next_)); }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_;
  int slots_, thread_;
  int next_;             // page that is to be fetched
  std::int32_t id_ = 0;  // its id, asked for one page earlier
};

}  // namespace oscar::cuda

#include "attention/float_tile.h"

#include <algorithm>

namespace oscar::attention {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

}  // namespace

void find_exact_rows(const AttentionArgs& args, const TilePlan& plan, bool is_k, int kv_head, int n_head_kv, int dim,
                     RowPointers& rows) {
  const std::uint16_t* base = args.cache->exact_rows(args.layer_index, is_k) + kv_head * dim;
  const std::int32_t* slot = args.cache->cells().slot;
  for (int j = 0; j < kTile; ++j) {
    rows[size_of(j)] = nullptr;
    if (!plan.reads_exact(j)) continue;
    const std::uint16_t* row = base + std::ptrdiff_t{slot[plan.cell(j)]} * n_head_kv * dim;
    rows[size_of(j)] = row;
    constexpr int kLine = 32;  // values
    for (int d = 0; d < dim; d += kLine) __builtin_prefetch(row + d);
    __builtin_prefetch(row + dim - 1);
  }
}

void FloatTile::load_exact(const Kernels& kernels, const RowPointers& rows, int dim, int ld) {
  ld_ = ld;
  rows_.reserve(size_of(kTile * ld));
  for (int j = 0; j < kTile; ++j) {
    float* out = rows_.data() + j * ld;
    const int n = (rows[size_of(j)] != nullptr) ? dim : 0;
    if (n != 0) kernels.widen(rows[size_of(j)], dim, out);
    std::fill(out + n, out + ld, 0.0F);
  }
}

void FloatTile::load_codes(const Codec& codec, const AttentionArgs& args, const TilePlan& plan, bool is_k, int kv_head, int dim,
                           int ld) {
  ld_ = ld;
  rows_.reserve(size_of(kTile * ld));
  for (int j = 0; j < kTile; ++j) {
    float* out = rows_.data() + j * ld;
    const int n = plan.reads_code(j) ? dim : 0;
    if (n != 0) codec.decode_inner(kv_head, args.cache->code(args.layer_index, is_k, plan.cell(j)), {out, size_of(dim)});
    std::fill(out + n, out + ld, 0.0F);
  }
}

void FloatTile::score(const Kernels& kernels, const float* q, int rows, float* s) {
  if (rows <= kFewRows) {
    kernels.dots(q, ld_, rows, rows_.data(), ld_, ld_, s);
    return;
  }
  panels_.reserve(size_of(kTile * ld_));
  kernels.transpose(rows_.data(), ld_, ld_, panels_.data());
  for (int p = 0; p < kTile; p += kPanel) {
    kernels.multiply(q, ld_, rows, ld_, panels_.data() + p * ld_, kPanel, kPanel, s + p, kTile, false);
  }
}

void FloatTile::add_values(const Kernels& kernels, const float* p, int rows, float* out) const {
  kernels.multiply(p, kTile, rows, kTile, rows_.data(), ld_, ld_, out, ld_, true);
}

}  // namespace oscar::attention

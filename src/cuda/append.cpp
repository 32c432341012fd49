// Host side of an append: checks. The kernel is in append.cuh, its launch in append.cu.
#include "oscar/cuda/append.h"

#include <algorithm>

#include "cuda/append_params.h"
#include "cuda/runtime.h"

namespace oscar::cuda {
namespace {

void check_arguments(const AppendArgs& a) {
  if (a.layer == nullptr || a.encoder == nullptr) fail("cuda append: the tables of the layer are missing");
  if (a.layer->codec != a.encoder->codec) fail("cuda append: the encoder is of another codec than the layer's pages");
  if (!paged::head_dim_fits(a.layer->head_dim))
    fail("cuda append: head_dim is {}; 64, 128 and 256 are possible", a.layer->head_dim);
  if (a.batch < 1) fail("cuda append: a batch of {} sequences", a.batch);
  if (a.n_rows < 1) fail("cuda append: {} rows", a.n_rows);
  if (a.row_start == nullptr && a.n_rows != a.batch)
    fail("cuda append: {} rows for {} sequences; row_start says which belong to which", a.n_rows, a.batch);
  if (a.sink < 0 || a.sink % paged::kBlockTokens != 0)
    fail("cuda append: a sink of {} tokens; a multiple of {} is needed", a.sink, paged::kBlockTokens);
  if (a.ring < 1) fail("cuda append: a ring of {} blocks", a.ring);
  if (a.page_columns < 1) fail("cuda append: the page table has no columns");
  const std::int64_t row = std::int64_t{a.layer->n_head_kv} * a.layer->head_dim;
  for (const std::int64_t stride : {a.k_stride, a.v_stride}) {
    if (stride != 0 && (stride < row || stride % 8 != 0))
      fail("cuda append: rows {} values apart; a multiple of 8 of at least {} is needed", stride, row);
  }
  const void* const needed[] = {a.k, a.v, a.lengths, a.pages, a.page_table.ids, a.blocks, a.block_table.ids};
  if (std::any_of(std::begin(needed), std::end(needed), [](const void* x) { return x == nullptr; }))
    fail("cuda append: a tensor is missing");
}

}  // namespace

void append(const AppendArgs& args, cudaStream_t stream) {
  check_arguments(args);
  const std::int64_t row = std::int64_t{args.layer->n_head_kv} * args.layer->head_dim;
  AppendParams p{};
  p.layer = *args.layer;
  p.encoder = *args.encoder;
  p.batch = args.batch;
  p.n_rows = args.n_rows;
  p.sink = args.sink;
  p.ring = args.ring;
  p.page_columns = args.page_columns;
  p.k_stride = args.k_stride != 0 ? args.k_stride : row;
  p.v_stride = args.v_stride != 0 ? args.v_stride : row;
  p.k = static_cast<const __half*>(args.k);
  p.v = static_cast<const __half*>(args.v);
  p.row_start = args.row_start;
  p.lengths = args.lengths;
  p.pages = static_cast<std::uint8_t*>(args.pages);
  p.page_table = IdWords(args.page_table);
  p.blocks = static_cast<__half*>(args.blocks);
  p.block_table = IdWords(args.block_table);
  check(launch_append(p, current_device(), stream), "the launch of an append");
}

}  // namespace oscar::cuda

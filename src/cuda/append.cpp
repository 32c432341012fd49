// Host side of an append: checks. The kernel is in append.cuh, its launch in append.cu.
#include "oscar/cuda/append.h"

#include "cuda/append_params.h"
#include "cuda/arguments.h"
#include "cuda/runtime.h"

namespace oscar::cuda {
namespace {

void check_arguments(const AppendArgs& a) {
  check_layer("append", a.layer);
  if (a.encoder == nullptr) fail("cuda append: the encoder's tables are missing");
  if (a.layer->codec != a.encoder->codec) fail("cuda append: the encoder is of another codec than the layer's pages");
  if (a.layer->n_head_kv != a.encoder->n_head_kv || a.layer->head_dim != a.encoder->head_dim)
    fail("cuda append: the encoder is of {} heads of {}, the layer's pages are of {} of {}; both must be of one layer",
         a.encoder->n_head_kv, a.encoder->head_dim, a.layer->n_head_kv, a.layer->head_dim);
  if (a.batch < 1) fail("cuda append: a batch of {} sequences; 1 or more are possible", a.batch);
  if (a.n_rows < 1) fail("cuda append: {} rows; 1 or more are possible", a.n_rows);
  if (a.row_start == nullptr && a.n_rows != a.batch)
    fail("cuda append: {} rows for {} sequences; row_start says which belong to which", a.n_rows, a.batch);
  check_cache("append", a, 1);
  const std::int64_t row = std::int64_t{a.layer->n_head_kv} * a.layer->head_dim;
  for (const std::int64_t stride : {a.k_stride, a.v_stride}) {
    if (stride != 0 && (stride < row || stride % 8 != 0))
      fail("cuda append: rows {} values apart; a multiple of 8 of at least {} is needed", stride, row);
  }
  check_tensors("append", {{"k", a.k, 16},
                           {"v", a.v, 16},
                           {"lengths", a.lengths, 4},
                           {"pages", a.pages, 128},
                           {"page_table", a.page_table.ids, 4},
                           {"blocks", a.blocks, 128},
                           {"block_table", a.block_table.ids, 4}});
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

// What of the decode needs no GPU: limits, sizes, sentences of errors.
#include "oscar/cuda/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "oscar/base/error.h"

namespace oscar::cuda {
namespace {

LayerView layer(int heads, int dim, int slots) {
  LayerView view;
  view.n_head_kv = heads;
  view.head_dim = dim;
  view.max_slots = slots;
  for (int h = 0; h < heads; ++h) {
    view.slots[h] = static_cast<std::uint16_t>(slots);
    view.head_offset[h] = view.page_bytes;
    view.page_bytes += paged::head_bytes(slots, dim);
  }
  return view;
}

TEST(DecodeHost, TheWorkspaceGrowsWithTheBatchOnly) {
  const LayerView view = layer(8, 128, 128);
  const std::size_t one = decode_workspace_bytes(view, 1, 4);
  const std::size_t two = decode_workspace_bytes(view, 2, 4);
  const std::size_t many = decode_workspace_bytes(view, 101, 4);
  EXPECT_GT(one, 0U);
  EXPECT_LT(one, 16U << 20);
  // Every part is rounded up to 256 bytes.
  EXPECT_NEAR(static_cast<double>(many - one), 100.0 * static_cast<double>(two - one), 100.0 * 6 * 256);
  EXPECT_GT(decode_workspace_bytes(view, 1, 8), one);
  EXPECT_EQ(decode_workspace_bytes(view, 1, 1, 8), decode_workspace_bytes(view, 1, 8));
  EXPECT_GT(decode_control_bytes(view, 101, 4), 101 * 8 * sizeof(std::uint32_t));
  EXPECT_LT(decode_control_bytes(view, 101, 4), many / 100);
}

TEST(DecodeHost, WhatTheKernelsCannotServeIsRefused) {
  EXPECT_THROW(static_cast<void>(decode_workspace_bytes(layer(8, 96, 96), 1, 4)), Error);
  EXPECT_THROW(static_cast<void>(decode_workspace_bytes(layer(8, 128, 128), 0, 4)), Error);
  EXPECT_THROW(static_cast<void>(decode_workspace_bytes(layer(8, 128, 128), 1, 17)), Error);
  EXPECT_THROW(static_cast<void>(decode_workspace_bytes(layer(8, 128, 128), 1, 4, 9)), Error);
  const LayerView view = layer(8, 128, 128);
  DecodeArgs args;
  args.layer = &view;
  args.batch = 1;
  args.group = 4;
  args.page_columns = 10;
  args.ring = 17;
  const auto message = [&](const DecodeArgs& a) {
    try {
      decode(a, nullptr);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message(args), testing::HasSubstr("a tensor is missing"));
  args.ring = 16;
  EXPECT_THAT(message(args), testing::HasSubstr("a ring of 16 blocks does not hold 256 recent rows"));
  args.ring = 17;
  args.queries = 3;
  EXPECT_THAT(message(args), testing::HasSubstr("a ring of 17 blocks does not hold 258 recent rows"));
  args.queries = 1;
  args.soft_cap = -1;
  EXPECT_THAT(message(args), testing::HasSubstr("a soft cap of -1"));
  args.soft_cap = 0;
  args.sink = 65;
  EXPECT_THAT(message(args), testing::HasSubstr("a multiple of 16 is needed"));
  args.sink = 64;
  int something = 0;
  args.q = args.pages = args.blocks = args.workspace = args.out = &something;
  args.lengths = &something;
  args.block_table = &something;
  EXPECT_THAT(message(args), testing::HasSubstr("a tensor is missing"));
  const std::int64_t wide = 0;
  args.page_table = &wide;
  EXPECT_THAT(message(args), testing::HasSubstr("a workspace of 0 bytes"));
}

}  // namespace
}  // namespace oscar::cuda

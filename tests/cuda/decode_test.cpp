// What of the decode needs no GPU: limits, sizes, sentences of errors.
#include "oscar/cuda/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>

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
  EXPECT_NEAR(static_cast<double>(many - one), 100.0 * static_cast<double>(two - one), 100.0 * 5 * 256);
  EXPECT_GT(decode_workspace_bytes(view, 1, 8), one);
  EXPECT_EQ(decode_workspace_bytes(view, 1, 1, 8), decode_workspace_bytes(view, 1, 8));
  EXPECT_LT(decode_control_bytes(), one / 1000);
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
  EXPECT_THAT(message(args), testing::HasSubstr("q is missing"));
  const auto refused = [&](auto&& change, const char* why) {
    DecodeArgs other = args;
    change(other);
    EXPECT_THAT(message(other), testing::HasSubstr(why));
  };
  refused([](DecodeArgs& a) { a.layer = nullptr; }, "the layer's tables are missing");
  refused([](DecodeArgs& a) { a.ring = 16; }, "a ring of 16 blocks; for 256 recent rows 17 to");
  refused([](DecodeArgs& a) { a.queries = 3; }, "a ring of 17 blocks; for 258 recent rows 18 to");
  refused([](DecodeArgs& a) { a.queries = std::numeric_limits<int>::max(); }, "query tokens per sequence");
  refused([](DecodeArgs& a) { a.recent = std::numeric_limits<int>::max(); }, "the window of recent rows is 2147483647");
  refused([](DecodeArgs& a) { a.recent = 0; }, "1 (the query's own token)");
  refused([](DecodeArgs& a) { a.soft_cap = -1; }, "a soft cap of -1");
  refused([](DecodeArgs& a) { a.soft_cap = std::numeric_limits<float>::infinity(); }, "a soft cap of inf");
  refused([](DecodeArgs& a) { a.scale = std::numeric_limits<float>::quiet_NaN(); }, "a scale of nan");
  refused([](DecodeArgs& a) { a.sink = 65; }, "a multiple of 16");
  refused([](DecodeArgs& a) { a.page_columns = 0; }, "a page table of 0 columns");
  const LayerView headless = layer(0, 128, 128);
  refused([&](DecodeArgs& a) { a.layer = &headless; }, "0 KV heads");

  alignas(256) std::array<std::int32_t, 64> something{};
  args.q = args.pages = args.blocks = args.workspace = args.out = something.data();
  args.lengths = something.data();
  args.block_table = something.data();
  EXPECT_THAT(message(args), testing::HasSubstr("page_table is missing"));
  const std::int64_t wide = 0;
  args.page_table = &wide;
  EXPECT_THAT(message(args), testing::HasSubstr("a workspace of 0 bytes"));
  refused([&](DecodeArgs& a) { a.pages = something.data() + 1; }, "pages begins at an address that is no multiple of 128");
  refused([&](DecodeArgs& a) { a.workspace = something.data() + 32; },
          "workspace begins at an address that is no multiple of 256");
  // Pages that are shared may be more than there is memory for.
  refused(
      [](DecodeArgs& a) {
        a.batch = 256;
        a.queries = 8;
        a.ring = 18;
        a.page_columns = 16384;
      },
      "256 sequences of up to 16384 pages are too many for one decode of 32 query rows");
}

}  // namespace
}  // namespace oscar::cuda

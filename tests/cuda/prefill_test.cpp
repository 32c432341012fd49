// What of a prefill needs no GPU: limits and the sentences of errors.
#include "oscar/cuda/prefill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cuda/prefill_params.h"
#include "oscar/base/error.h"

namespace oscar::cuda {
namespace {

std::string message(const PrefillArgs& args) {
  try {
    prefill(args, nullptr);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// All that is asked for but tensors.
PrefillArgs without_tensors(const LayerView& layer) {
  PrefillArgs args;
  args.layer = &layer;
  args.batch = 2;
  args.n_tokens = 100;
  args.group = 4;
  args.page_columns = 10;
  args.ring = 17;
  return args;
}

TEST(PrefillHost, WhatTheKernelCannotServeIsRefused) {
  LayerView layer;
  layer.n_head_kv = 8;
  layer.head_dim = 128;
  const PrefillArgs good = without_tensors(layer);
  EXPECT_THAT(message(good), testing::HasSubstr("q is missing"));
  const auto refused = [&](auto&& change, const char* why) {
    PrefillArgs args = good;
    change(args);
    EXPECT_THAT(message(args), testing::HasSubstr(why));
  };
  refused([](PrefillArgs& a) { a.layer = nullptr; }, "the layer's tables are missing");
  refused([](PrefillArgs& a) { a.batch = 0; }, "a batch of 0 sequences");
  refused([](PrefillArgs& a) { a.n_tokens = 0; }, "0 query tokens");
  refused([](PrefillArgs& a) { a.group = 17; }, "17 query heads per KV head");
  refused([](PrefillArgs& a) { a.sink = 65; }, "a multiple of 16 up to");
  refused([](PrefillArgs& a) { a.recent = 0; }, "1 (the query's own token)");
  refused([](PrefillArgs& a) { a.ring = 16; }, "a ring of 16 blocks; for 256 recent rows 17 to");
  refused([](PrefillArgs& a) { a.scale = 0; }, "a scale of 0");
  refused([](PrefillArgs& a) { a.soft_cap = -1; }, "a soft cap of -1");
  refused([](PrefillArgs& a) { a.page_columns = 0; }, "a page table of 0 columns");
  refused([](PrefillArgs& a) { a.k_stride = 1020; }, "rows begin every 1020 values");
  refused([](PrefillArgs& a) { a.v_stride = 1028; }, "rows begin every 1028 values");
  layer.head_dim = 96;
  EXPECT_THAT(message(good), testing::HasSubstr("head_dim is 96; 64, 128 and 256 are possible"));
}

TEST(PrefillHost, BothCodecsAndAllHeadDimsAreServed) {
  LayerView layer;
  layer.n_head_kv = 8;
  const PrefillArgs args = without_tensors(layer);
  for (const paged::PageCodec codec : {paged::PageCodec::spectral, paged::PageCodec::int2}) {
    for (const int head_dim : {64, 128, 256}) {
      layer.codec = codec;
      layer.head_dim = head_dim;
      EXPECT_THAT(message(args), testing::HasSubstr("q is missing"));  // nothing else
    }
  }
}

TEST(PrefillHost, WhichKernelServesWhat) {
  LayerView layer;
  layer.head_dim = 128;
  EXPECT_EQ(choose_prefill_kernel(layer, 9, true), PrefillKernel::wgmma);
  EXPECT_EQ(choose_prefill_kernel(layer, 8, true), PrefillKernel::portable);
  EXPECT_EQ(choose_prefill_kernel(layer, 10, true), PrefillKernel::portable);
  EXPECT_THROW((void)choose_prefill_kernel(layer, 7, true), Error);
  EXPECT_EQ(choose_prefill_kernel(layer, 9, false), PrefillKernel::portable);  // built without sm_90a
  layer.head_dim = 256;
  EXPECT_EQ(choose_prefill_kernel(layer, 9, true), PrefillKernel::portable);
  layer.head_dim = 64;
  EXPECT_EQ(choose_prefill_kernel(layer, 9, true), PrefillKernel::wgmma);
  layer.codec = paged::PageCodec::int2;
  EXPECT_EQ(choose_prefill_kernel(layer, 9, true), PrefillKernel::portable);
}

}  // namespace
}  // namespace oscar::cuda

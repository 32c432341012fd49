// What of the append needs no GPU: limits and sentences of errors.
#include "oscar/cuda/append.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "oscar/base/error.h"

namespace oscar::cuda {
namespace {

TEST(AppendHost, WhatTheKernelCannotServeIsRefused) {
  LayerView layer;
  layer.n_head_kv = 2;
  layer.head_dim = 128;
  EncoderView encoder;
  encoder.n_head_kv = 2;
  encoder.head_dim = 128;
  alignas(128) std::int32_t something[4] = {};
  AppendArgs good;
  good.layer = &layer;
  good.encoder = &encoder;
  good.batch = good.n_rows = 3;
  good.page_columns = 10;
  good.ring = 17;
  good.k = good.v = good.pages = good.blocks = something;
  good.lengths = something;
  good.page_table = something;
  good.block_table = paged::IdTable(something, true);
  const auto message = [&](const std::function<void(AppendArgs&)>& spoil) {
    AppendArgs args = good;
    spoil(args);
    try {
      append(args, nullptr);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  using testing::HasSubstr;
  EXPECT_THAT(message([](AppendArgs& a) { a.layer = nullptr; }), HasSubstr("the layer's tables are missing"));
  EXPECT_THAT(message([](AppendArgs& a) { a.encoder = nullptr; }), HasSubstr("the encoder's tables are missing"));
  EXPECT_THAT(message([](AppendArgs& a) { a.n_rows = 4; }), HasSubstr("4 rows for 3 sequences"));
  EXPECT_THAT(message([](AppendArgs& a) { a.sink = 65; }), HasSubstr("a multiple of 16 up to"));
  EXPECT_THAT(message([](AppendArgs& a) { a.ring = 0; }), HasSubstr("a ring of 0 blocks"));
  EXPECT_THAT(message([](AppendArgs& a) { a.k_stride = 255; }), HasSubstr("rows 255 values apart"));
  EXPECT_THAT(message([](AppendArgs& a) { a.v_stride = 260; }), HasSubstr("a multiple of 8 of at least 256"));
  EXPECT_THAT(message([](AppendArgs& a) { a.v = nullptr; }), HasSubstr("v is missing"));
  EXPECT_THAT(message([](AppendArgs& a) { a.page_table = nullptr; }), HasSubstr("page_table is missing"));
  EXPECT_THAT(message([](AppendArgs& a) { a.block_table.ids = nullptr; }), HasSubstr("block_table is missing"));
  EXPECT_THAT(message([](AppendArgs& a) { a.k = static_cast<const char*>(a.k) + 8; }), HasSubstr("no multiple of 16"));
  encoder.n_head_kv = 4;
  EXPECT_THAT(message([](AppendArgs&) {}), HasSubstr("the encoder is of 4 heads of 128, the layer's pages are of 2 of 128"));
  encoder.n_head_kv = 2;
  layer.codec = paged::PageCodec::int2;
  EXPECT_THAT(message([](AppendArgs&) {}), HasSubstr("the encoder is of another codec"));
  layer.codec = paged::PageCodec::spectral;
  layer.head_dim = 96;
  EXPECT_THAT(message([](AppendArgs&) {}), HasSubstr("head_dim is 96"));
}

}  // namespace
}  // namespace oscar::cuda

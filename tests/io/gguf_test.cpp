#include "oscar/io/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/gguf_builder.h"

namespace oscar {
namespace {

using test::error_of;
using test::GgufBuilder;
using test::Scratch;
using test::small_llama;
using testing::AllOf;
using testing::HasSubstr;

std::string error_for(const std::string& bytes) {
  const Scratch scratch;
  const auto path = scratch.write("broken.gguf", bytes);
  const std::string error = error_of([&] { Gguf file(path); });
  EXPECT_THAT(error, HasSubstr("broken.gguf"));
  return error;
}

TEST(Gguf, ReadsMetadataAndTensors) {
  const Scratch scratch;
  const std::vector<std::int8_t> nested = {1, -2};
  GgufBuilder builder = small_llama();
  builder.pair("i8", 1, "\xff").pair("i64", 11, GgufBuilder::raw(std::int64_t{-5})).pair("flag", 7, "\1");
  builder.pair("f64", 12, GgufBuilder::raw(2.5)).u32s("sizes", {1, 2, 3});
  builder.pair("texts", 9, GgufBuilder::raw(std::uint32_t{8}) + GgufBuilder::raw(std::uint64_t{1}) + GgufBuilder::string("ab"));
  for (const std::uint32_t version : {2U, 3U}) {
    const Gguf file(scratch.write("a.gguf", builder.bytes(version)));
    EXPECT_EQ(file.text("general.name"), "small");
    EXPECT_EQ(file.integer("llama.block_count"), 2);
    EXPECT_EQ(file.integer("i8"), -1);
    EXPECT_EQ(file.integer("i64"), -5);
    EXPECT_EQ(file.number("f64"), 2.5);
    EXPECT_EQ(file.number("llama.block_count"), 2.0);
    EXPECT_EQ(file.integer("absent"), std::nullopt);
    EXPECT_THAT(error_of([&] { (void)file.integer("general.name"); }), HasSubstr("general.name"));
    EXPECT_THAT(error_of([&] { (void)file.text("flag"); }), HasSubstr("flag"));
    EXPECT_EQ(std::get<GgufArray>(file.metadata().at("sizes").data).size(), 3U);
    ASSERT_NE(file.find("blk.0.attn_q.weight"), nullptr);
    EXPECT_EQ(file.find("blk.0.attn_q.weight")->bytes, 68U);
    EXPECT_EQ(file.find("nothing"), nullptr);
    const auto bytes = file.read(*file.find("blk.1.attn_norm.weight"));
    ASSERT_EQ(bytes.size(), 8U);
    float value = 0;
    std::memcpy(&value, bytes.data() + 4, 4);
    EXPECT_EQ(value, 5.0F);
  }
}

TEST(Gguf, A1ZeroDimensionAndEmptyNames) {
  GgufBuilder zero;
  zero.describe("w", 2, {32, 0}, 8, 0);
  EXPECT_THAT(error_for(zero.bytes()), AllOf(HasSubstr("'w'"), HasSubstr("dimension of 0")));
  EXPECT_THAT(error_for(GgufBuilder().u32("", 1).bytes()), HasSubstr("empty key"));
  EXPECT_THAT(error_for(GgufBuilder().describe("", 1, {1}, 0, 0).bytes()), HasSubstr("empty name"));
  EXPECT_THAT(error_for(GgufBuilder().u32("k", 1).u32("k", 2).bytes()), HasSubstr("'k' appears twice"));
  EXPECT_THAT(error_for(GgufBuilder().floats("w", {1}).floats("w", {1}).bytes()), HasSubstr("'w' appears twice"));
}

TEST(Gguf, A2SizeThatWrapsAround) {
  const std::uint64_t huge = (std::uint64_t{1} << 42) + 1;
  EXPECT_THAT(error_for(GgufBuilder().describe("wrap", 4, {huge, 1 << 20, 1, 1}, 0, 0).bytes()), HasSubstr("'wrap'"));
  EXPECT_THAT(error_for(GgufBuilder().describe("wrap", 2, {std::uint64_t{1} << 32, std::uint64_t{1} << 32}, 0, 0).bytes()),
              AllOf(HasSubstr("'wrap'"), HasSubstr("overflows")));
  EXPECT_THAT(error_for(GgufBuilder().describe("far", 1, {8}, 0, ~std::uint64_t{0} - 31).bytes()), HasSubstr("'far'"));
}

TEST(Gguf, A4CountsAndTypes) {
  for (const std::uint32_t n : {0U, 5U, 1'000'000U, 0xFFFFFFFFU}) {
    EXPECT_THAT(error_for(GgufBuilder().describe("w", n, {1, 1, 1, 1, 1}, 0, 0).bytes()), HasSubstr("dimensions")) << n;
  }
  for (const std::uint32_t type : {4U, 5U, 31U, 33U, 43U, 0xFFFFFFFFU}) {
    EXPECT_THAT(error_for(GgufBuilder().describe("w", 1, {32}, type, 0).bytes()),
                AllOf(HasSubstr("'w'"), HasSubstr("unknown type")));
  }
  EXPECT_THAT(error_for(GgufBuilder().pair("k", 13, "").bytes()), HasSubstr("unknown type 13"));
  EXPECT_THAT(error_for(GgufBuilder().pair("k", 8, GgufBuilder::raw(~std::uint64_t{0})).bytes()), HasSubstr("claims"));
  EXPECT_THAT(error_for(GgufBuilder().pair("k", 7, "\2").bytes()), HasSubstr("boolean"));
  EXPECT_THAT(error_for(GgufBuilder().describe("w", 1, {33}, 8, 0).bytes()), HasSubstr("whole blocks"));
  const std::string many = GgufBuilder::raw(std::uint32_t{0}) + GgufBuilder::raw(std::uint64_t{1} << 40);
  EXPECT_THAT(error_for(GgufBuilder().pair("k", 9, many).bytes()), HasSubstr("claims"));
  std::string deep;
  for (int i = 0; i < 10; ++i) deep += GgufBuilder::raw(std::uint32_t{9}) + GgufBuilder::raw(std::uint64_t{1});
  EXPECT_THAT(error_for(GgufBuilder().pair("k", 9, deep + std::string(64, '\0')).bytes()), HasSubstr("nested"));
  std::string counts =
      "GGUF" + GgufBuilder::raw(std::uint32_t{3}) + GgufBuilder::raw(~std::uint64_t{0}) + GgufBuilder::raw(std::uint64_t{0});
  EXPECT_THAT(error_for(counts), HasSubstr("do not fit"));
  for (const std::uint32_t alignment : {0U, 3U}) {
    EXPECT_THAT(error_for(GgufBuilder().u32("general.alignment", alignment).bytes()), HasSubstr("alignment"));
  }
}

TEST(Gguf, A7TruncatedOrShardedFiles) {
  const std::string whole = small_llama().bytes();
  EXPECT_THAT(error_for(whole.substr(0, whole.size() - 32)), AllOf(HasSubstr("incomplete"), HasSubstr("out of bounds")));
  EXPECT_THAT(error_for(whole.substr(0, 100)), HasSubstr("incomplete"));
  EXPECT_THAT(error_for(whole.substr(0, 20)), HasSubstr("too short"));
  GgufBuilder shard = small_llama();
  shard.u32("split.no", 1).u32("split.count", 3);
  EXPECT_THAT(error_for(shard.bytes()), HasSubstr("shard 2 of 3"));
  EXPECT_THAT(error_for(shard.bytes() + shard.bytes()), HasSubstr("shard 2 of 3"));  // joined with cat
  const Scratch scratch;
  const auto path = scratch.write("cut.gguf", whole);
  const Gguf file(path);
  std::filesystem::resize_file(path, whole.size() / 2);  // cut while in use: an error, not a signal
  EXPECT_THAT(error_of([&] { (void)file.read(*file.find("blk.0.attn_q.weight")); }), HasSubstr("changed"));
}

TEST(Gguf, A8BigEndianAndOtherVersions) {
  std::string big = "GGUF";
  big += std::string("\0\0\0\3", 4) + std::string(16, '\0');
  EXPECT_THAT(error_for(big), HasSubstr("big-endian"));
  EXPECT_THAT(error_for("FUGG" + std::string(20, '\0')), HasSubstr("big-endian"));
  EXPECT_THAT(error_for(GgufBuilder().bytes(1)), HasSubstr("version 1"));
  EXPECT_THAT(error_for(GgufBuilder().bytes(4)), HasSubstr("version 4"));
  EXPECT_THAT(error_for("ggml" + std::string(20, '\0')), HasSubstr("not a GGUF file"));
}

TEST(Gguf, DamagedFilesNeverCrash) {
  const Scratch scratch;
  GgufBuilder builder = small_llama();
  builder.u32s("sizes", {1, 2}).text("t", "some text");
  const std::string valid = builder.bytes();
  (void)describe_model(Gguf(scratch.write("valid", valid)));
  const auto counts =
      test::mutate(scratch, valid, builder.header().size() + 40, [](const auto& path) { (void)describe_model(Gguf(path)); });
  EXPECT_GT(counts.refused, 1000);
  EXPECT_GT(counts.accepted, 20);
}

}  // namespace
}  // namespace oscar

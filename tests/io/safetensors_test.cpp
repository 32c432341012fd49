#include "oscar/io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/scratch.h"
#include "oscar/base/half.h"
#include "oscar/io/json.h"

namespace oscar {
namespace {

using test::append_number;
using test::error_of;
using test::Scratch;
using testing::HasSubstr;

std::string file_of(const std::string& header, std::size_t data) {
  std::string bytes;
  append_number(bytes, std::uint64_t{header.size()});
  return bytes + header + std::string(data, '\x01');
}

std::string error_for(const std::string& bytes) {
  const Scratch scratch;
  const auto path = scratch.write("broken.safetensors", bytes);
  const std::string error = error_of([&] { read_safetensors(path); });
  EXPECT_THAT(error, HasSubstr("broken.safetensors"));
  return error;
}

std::string tensor(const std::string& name, const std::string& shape, int begin, int end, const std::string& dtype = "F32") {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", name, dtype, shape, begin, end);
}

TEST(Safetensors, RoundTripKeepsEveryByte) {
  const Scratch scratch;
  SafeTensors file;
  const std::vector<float> floats = {1.5F, -0.0F, 3e-45F, 1e38F, 0.1F, 7};
  const std::vector<double> doubles = {0.1, -1e300};
  file.tensors["f"] = to_tensor(std::span(floats), {2, 3});
  file.tensors["d"] = to_tensor(std::span(doubles), {2});
  file.tensors["empty"] = to_tensor(std::span<const float>(), {0, 5});
  file.tensors["scalar"] = to_tensor(std::span(floats).first(1), {});
  file.tensors["odd"] = {"U8", {3}, {std::byte{1}, std::byte{2}, std::byte{255}}};
  file.metadata["note"] = "a \"quoted\" text \xc3\xa9";
  const auto path = scratch.path("a.safetensors");
  write_safetensors(file, path);
  const SafeTensors back = read_safetensors(path);
  EXPECT_EQ(back.metadata, file.metadata);
  ASSERT_EQ(back.tensors.size(), file.tensors.size());
  for (const auto& [name, expected] : file.tensors) {
    const SafeTensor& actual = back.tensors.at(name);
    EXPECT_EQ(actual.dtype, expected.dtype) << name;
    EXPECT_EQ(actual.shape, expected.shape) << name;
    EXPECT_EQ(actual.bytes, expected.bytes) << name;
  }
  EXPECT_EQ(to_doubles(back.tensors.at("d"), "d"), doubles);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.folder()), {}), 1) << "no temporary may stay";
  const std::string bytes = test::slurp(path);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  EXPECT_EQ(header % 8, 0U);
}

TEST(Safetensors, ConvertsFloatTypesOnly) {
  const auto of = [](const char* dtype, std::uint16_t bits) {
    SafeTensor t{dtype, {1}, std::vector<std::byte>(2)};
    std::memcpy(t.bytes.data(), &bits, 2);
    return t;
  };
  EXPECT_EQ(to_floats(of("F16", float_to_half(-2.5F)), "x").at(0), -2.5F);
  EXPECT_EQ(to_floats(of("BF16", 0x3FC0), "x").at(0), 1.5F);
  EXPECT_EQ(to_doubles(of("BF16", 0xC000), "x").at(0), -2.0);
  EXPECT_THAT(error_of([&] { to_floats(of("I16", 1), "the mean of layer 3"); }), HasSubstr("the mean of layer 3"));
  EXPECT_THAT(error_of([&] { to_doubles(of("F4", 1), "x"); }), HasSubstr("F4"));
}

TEST(Safetensors, A9SizeMismatchBothWays) {
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[32,8]", 0, 65536) + "}", 65536)), HasSubstr("size mismatch"));
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[32,8]", 0, 1000) + "}", 1000)), HasSubstr("size mismatch"));
}

TEST(Safetensors, A10HeaderLength) {
  for (const std::uint64_t length :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1000}, std::uint64_t{1}, std::uint64_t{0}}) {
    std::string bytes;
    append_number(bytes, length);
    EXPECT_THAT(error_for(bytes + "{}      "), HasSubstr("header claims")) << length;
  }
  EXPECT_THAT(error_for(""), HasSubstr("too short"));
  EXPECT_THAT(error_for("12345678{"), HasSubstr("too short"));
  EXPECT_THAT(error_for(file_of(" {}", 0)), HasSubstr("does not start"));
}

TEST(Safetensors, A12LayoutMustTileTheData) {
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 0, 8) + "," + tensor("b", "[2]", 4, 12) + "}", 12)),
              HasSubstr("overlaps"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 0, 8) + "," + tensor("b", "[2]", 12, 20) + "}", 20)),
              HasSubstr("hole of 4"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 4, 12) + "}", 12)), HasSubstr("hole of 4"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 0, 8) + "}", 11)), HasSubstr("3 trailing bytes"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 0, 8) + "}", 7)), HasSubstr("incomplete"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 8, 0) + "}", 8)), HasSubstr("claims bytes 8..0"));
  EXPECT_THAT(error_for(file_of("{" + tensor("a", "[2]", 0, 8) + "," + tensor("a", "[2]", 8, 16) + "}", 16)),
              HasSubstr("'a' twice"));
  EXPECT_THAT(error_for(file_of(R"({"__metadata__":{"x":"1","x":"2"}})", 0)), HasSubstr("'x' twice"));
}

TEST(Safetensors, WrongFieldsAreNamed) {
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[2]", 0, 8, "Q4") + "}", 8)), HasSubstr("unknown dtype 'Q4'"));
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[-2]", 0, 8) + "}", 8)), HasSubstr("tensor 'w'"));
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[1.5]", 0, 8) + "}", 8)), HasSubstr("tensor 'w'"));
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[4294967296,4294967296,4]", 0, 8) + "}", 8)), HasSubstr("too large"));
  EXPECT_THAT(error_for(file_of("{" + tensor("w", "[18446744073709551615]", 0, 8) + "}", 8)), HasSubstr("too large"));
  EXPECT_THAT(error_for(file_of(R"({"w":{"dtype":"F32","shape":[2]}})", 8)), HasSubstr("no 'data_offsets'"));
  EXPECT_THAT(error_for(file_of(R"({"w":[1]})", 8)), HasSubstr("not a JSON object"));
  EXPECT_THAT(error_for(file_of(R"({"__metadata__":{"x":1}})", 0)), HasSubstr("not a string"));
  EXPECT_THAT(error_for(file_of("{\"w\":", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_for(file_of("{\"w\":" + std::string(100'000, '['), 0)), HasSubstr("nested deeper"));
}

TEST(Safetensors, WriterRefusesWhatItCouldNotRead) {
  const Scratch scratch;
  const auto path = scratch.path("x.safetensors");
  SafeTensors file;
  file.tensors["w"] = {"F32", {3}, std::vector<std::byte>(8)};
  EXPECT_THAT(error_of([&] { write_safetensors(file, path); }), HasSubstr("'w'"));
  file.tensors.clear();
  file.metadata["x"] = "\xff";
  EXPECT_THAT(error_of([&] { write_safetensors(file, path); }), HasSubstr("UTF-8"));
  EXPECT_FALSE(std::filesystem::exists(path));
  file.metadata.clear();
  EXPECT_THAT(error_of([&] { write_safetensors(file, scratch.path("no/such/x")); }), HasSubstr("does not exist"));
  const std::vector<float> values(3);
  EXPECT_THAT(error_of([&] { to_tensor(std::span(values), {2, 2}); }), HasSubstr("3 values"));
}

TEST(Safetensors, DamagedHeadersNeverCrash) {
  const Scratch scratch;
  const std::string valid =
      file_of("{" + tensor("a", "[2]", 0, 8) + "," + tensor("b", "[1,2]", 8, 12, "F16") + R"(,"__metadata__":{"k":"v"}})", 12);
  read_safetensors(scratch.write("valid", valid));
  const auto counts = test::mutate(scratch, valid, valid.size(), [](const auto& path) { read_safetensors(path); });
  EXPECT_GT(counts.refused, 500);
  EXPECT_GT(counts.accepted, 20);  // names and data bytes may be anything
}

}  // namespace
}  // namespace oscar

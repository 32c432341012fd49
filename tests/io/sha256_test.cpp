#include "oscar/io/sha256.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/scratch.h"

namespace oscar {
namespace {

using test::error_of;
using test::Scratch;

// FIPS 180-2 examples.
constexpr const char* kEmpty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
constexpr const char* kAbc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr const char* kMillionA = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";

TEST(Sha256, PublishedExamples) {
  EXPECT_EQ(sha256_hex({}), kEmpty);
  Sha256 hash;
  hash.update(std::string_view("a"));
  hash.update(std::string_view(""));
  hash.update(std::string_view("bc"));
  EXPECT_EQ(hash.hex(), kAbc);
}

TEST(Sha256, FileInManyReads) {
  const Scratch scratch;
  EXPECT_EQ(sha256_file(scratch.write("a", std::string(1'000'000, 'a'))), kMillionA);
  EXPECT_EQ(sha256_file(scratch.write("empty", "")), kEmpty);
  const std::string large(3 * 1024 * 1024 + 17, 'x');
  EXPECT_EQ(sha256_file(scratch.write("large", large)), sha256_hex(std::as_bytes(std::span(large))));
}

TEST(Sha256, MissingFileAndFolderAreNamed) {
  const Scratch scratch;
  EXPECT_THAT(error_of([&] { sha256_file(scratch.path("absent")); }), testing::HasSubstr("absent"));
  EXPECT_THAT(error_of([&] { sha256_file(scratch.folder()); }), testing::HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace oscar

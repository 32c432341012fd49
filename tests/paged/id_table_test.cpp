#include "oscar/paged/id_table.h"

#include <gtest/gtest.h>

namespace oscar::paged {
namespace {

TEST(IdTable, IdsOfEitherWidthReadTheSame) {
  const std::int32_t narrow[] = {7, -1, 2147483647};
  const std::int64_t wide[] = {7, -1, 2147483647};
  const IdTable a = narrow;
  const IdTable b = wide;
  const IdTable c(static_cast<const void*>(wide), true);
  EXPECT_FALSE(a.wide);
  EXPECT_TRUE(b.wide);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(a[i], wide[i]);
    EXPECT_EQ(b[i], wide[i]);
    EXPECT_EQ(c[i], wide[i]);
  }
  EXPECT_EQ(IdTable(nullptr).ids, nullptr);
}

}  // namespace
}  // namespace oscar::paged

#include "oscar/base/date.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "oscar/base/error.h"

namespace oscar {
namespace {

class Date : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("SOURCE_DATE_EPOCH"); }
  static std::string at(const char* epoch) {
    setenv("SOURCE_DATE_EPOCH", epoch, 1);
    return utc_date();
  }
};

TEST_F(Date, IsNowUnlessSaidOtherwise) {
  unsetenv("SOURCE_DATE_EPOCH");
  const std::string first = utc_date(), second = utc_date();
  EXPECT_THAT(first, testing::MatchesRegex("2[0-9]{3}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]Z"));
  EXPECT_LE(first, second);
  EXPECT_EQ(at("0"), "1970-01-01T00:00:00Z");
  EXPECT_EQ(at("951782400"), "2000-02-29T00:00:00Z");
  EXPECT_EQ(at("253402300799"), "9999-12-31T23:59:59Z");
  EXPECT_GT(at(""), "2026");
}

TEST_F(Date, RefusesWhatIsNoDate) {
  for (const char* wrong : {"yesterday", "12x", "-1", " 1", "253402300800", "99999999999999999999"}) {
    try {
      ADD_FAILURE() << wrong << " became " << at(wrong);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("SOURCE_DATE_EPOCH"), testing::HasSubstr(wrong)));
    }
  }
}

}  // namespace
}  // namespace oscar

#include "oscar/codec/rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "oscar/base/error.h"

namespace oscar {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Rates, AreFour) {
  EXPECT_EQ(rate_names(), "1.5, 2, 2.5 or 3");
  for (const double rate : kSpectralRates) {
    EXPECT_TRUE(is_rate(rate));
    EXPECT_EQ(find_rate(fmt::format("{}", rate)), rate);
  }
  EXPECT_EQ(find_rate("2.0"), 2.0);
  for (const char* text : {"", "1", "2.25", "4", "nan", "2x", " 2", "+2"}) EXPECT_FALSE(find_rate(text)) << text;
}

TEST(LayerRates, EveryFormIsRead) {
  const std::vector<LayerRates> layers = parse_layer_rates("5-7:k3,0:3,1:3/2.5,6:v1.5");
  const std::vector<LayerRates> expected = {
      {0, 3.0, 3.0}, {1, 3.0, 2.5}, {5, 3.0, std::nullopt}, {6, 3.0, 1.5}, {7, 3.0, std::nullopt}};
  EXPECT_EQ(layers, expected);
  EXPECT_TRUE(parse_layer_rates("none").empty());
}

TEST(LayerRates, TextIsTheShortestThatReadsTheSame) {
  for (const auto& [given, text] :
       {std::pair("2:3,0:3,1:3", "0-2:3"), std::pair("0:k3,0:v3", "0:3"), std::pair("0-3:k2.5,2:v3", "0-1:k2.5,2:2.5/3,3:k2.5"),
        std::pair("4:v1.5,6:v1.5", "4:v1.5,6:v1.5"), std::pair("none", "none")}) {
    EXPECT_EQ(to_text(parse_layer_rates(given)), text);
    EXPECT_EQ(to_text(parse_layer_rates(text)), text);
  }
}

TEST(LayerRates, WrongEntriesAreNamed) {
  const auto refused = [](const char* text, const char* entry, const char* why) {
    try {
      (void)parse_layer_rates(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr(fmt::format("layer_bits: '{}'", entry)), HasSubstr(why), HasSubstr("0:3,1:3/2.5")));
    }
  };
  refused("", "", "has no colon");
  refused("0:3,", "", "has no colon");
  refused("0:3,5", "5", "has no colon");
  refused("0:4", "0:4", "gives '4' bits, but only 1.5, 2, 2.5 or 3 exist");
  refused("0:", "0:", "gives '' bits");
  refused("0:k", "0:k", "gives '' bits");
  refused("0:3/", "0:3/", "gives '' bits");
  refused("0:k3/2", "0:k3/2", "gives 'k3' bits");
  refused("x:3", "x:3", "names the layer 'x'");
  refused("-1:3", "-1:3", "names the layer ''");
  refused("1-:3", "1-:3", "names the layer ''");
  refused("0-10000:3", "0-10000:3", "names the layer '10000'");
  refused("99999999999:3", "99999999999:3", "names the layer");
  refused("7-5:3", "7-5:3", "ends before it begins");
  refused("0-2:3,1:k2", "1:k2", "gives layer 1 a second rate for K");
  refused("0:v3,0:v3", "0:v3", "a second rate for V");
}

}  // namespace
}  // namespace oscar

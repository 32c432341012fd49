#include "oscar/base/date.h"

#include <fmt/chrono.h>

#include <charconv>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {

std::string utc_date() {
  std::time_t seconds = std::time(nullptr);
  if (const char* given = std::getenv("SOURCE_DATE_EPOCH"); given != nullptr && *given != '\0') {
    constexpr std::time_t kYear10000 = 253402300800;
    const std::string_view text = given;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error != std::errc{} || end != text.data() + text.size() || seconds < 0 || seconds >= kYear10000) {
      fail("SOURCE_DATE_EPOCH is \"{}\", but it is a date in seconds since 1970: set a whole number or unset it", text);
    }
  }
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(seconds));
}

}  // namespace oscar

// Errors are sentences: they name the thing that is wrong and, where there is one, the fix.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace oscar {

// Thrown for everything a user or a file can cause. what() is one sentence fit to be printed after "oscar: error: ".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace oscar

// Lines for the user, refusals, and the end of the program in strict mode.
#pragma once

#include <string>
#include <string_view>

namespace oscar::llama {

inline constexpr int kStrictExit = 3;

void say(int level, std::string_view line);  // stderr, "oscar: " in front, when the configured log level is >= level
// Something is left to stock llama.cpp although OSCAR was asked for. Printed once per sentence; kept as `refused` in the
// statistics; strict mode ends the program.
void refuse(std::string_view sentence);
[[noreturn]] void die(std::string_view sentence);  // prints, writes statistics, exits with kStrictExit without unwinding
std::string last_refusal();

}  // namespace oscar::llama

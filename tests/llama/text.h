// Deterministic English-like text, so that tests need no data file and every model sees ordinary words: sentences drawn from
// word lists by a linear congruential generator. The same seed gives the same text on every machine.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace oscar::testing {

// At least `words` words, ending with a full stop.
inline std::string make_text(std::uint64_t seed, std::size_t words) {
  static constexpr std::array<std::string_view, 16> kWho{"The miller",     "A young clerk", "Her brother",  "The captain",
                                                         "An old teacher", "The committee", "My neighbour", "The engineer",
                                                         "A farmer",       "The doctor",    "Nobody",       "The new king",
                                                         "Every visitor",  "The gardener",  "A merchant",   "The pilot"};
  static constexpr std::array<std::string_view, 16> kDid{
      "counted",  "carried",  "remembered", "painted",   "sold",      "measured", "described", "repaired",
      "promised", "borrowed", "followed",   "explained", "collected", "opened",   "lost",      "weighed"};
  static constexpr std::array<std::string_view, 16> kWhat{
      "seven copper coins", "the northern road", "a letter from the coast", "the broken engine",  "three sacks of grain",
      "a map of the river", "the price of salt", "two old clocks",          "the longest bridge", "a box of tools",
      "the empty house",    "an unusual number", "the winter harvest",      "a small telescope",  "the answer",
      "the green door"};
  static constexpr std::array<std::string_view, 16> kWhen{
      "before the rain came",  "at the end of the market", "while the others slept",      "after the second bell",
      "in the spring of 1848", "without telling anyone",   "because the law required it", "as quickly as possible",
      "near the harbour wall", "for nearly eleven years",  "in spite of the cold",        "with great care",
      "and then walked home",  "but kept the key",         "so that it would be safe",    "until the lamp went out"};
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL;
  const auto draw = [&state](const std::array<std::string_view, 16>& list) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return list[static_cast<std::size_t>(state >> 60)];
  };
  std::string text;
  std::size_t written = 0;
  while (written < words) {
    const std::size_t begin = text.size();
    text.append(draw(kWho))
        .append(" ")
        .append(draw(kDid))
        .append(" ")
        .append(draw(kWhat))
        .append(" ")
        .append(draw(kWhen))
        .append(". ");
    written += static_cast<std::size_t>(std::count(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), ' '));
  }
  text.pop_back();
  return text;
}

}  // namespace oscar::testing

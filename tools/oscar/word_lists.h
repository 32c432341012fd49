// What made-up texts of `oscar eval` are made of: names, common words, and a seeded choice among them.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace oscar::cli {

inline constexpr std::size_t kNames = 20;
inline constexpr std::array<const char*, kNames> kTowns = {
    "Abbotsford", "Bellmere",  "Corwick",  "Dunholm", "Eastvale", "Farrow",  "Glenmoor", "Harrowby", "Ironbridge", "Juniper",
    "Kingsley",   "Larkfield", "Midhurst", "Northam", "Oakridge", "Penrose", "Quarry",   "Redcliff", "Stonegate",  "Thornbury"};
inline constexpr std::array<const char*, kNames> kPersons = {"Alice",  "Bruno", "Clara",  "David", "Emma",   "Frank", "Grace",
                                                             "Henry",  "Irene", "Jacob",  "Karen", "Louis",  "Maria", "Nathan",
                                                             "Olivia", "Peter", "Rachel", "Simon", "Teresa", "Victor"};
// Common words: one token each in most vocabularies, so that a question costs one pass.
inline constexpr std::array<const char*, 48> kWords = {
    "apple",  "banana", "bottle", "bridge", "butter", "button", "camera",  "candle", "carpet", "castle", "cherry", "circle",
    "coffee", "copper", "cotton", "desert", "dragon", "engine", "feather", "flower", "forest", "garden", "guitar", "hammer",
    "honey",  "island", "jacket", "ladder", "lemon",  "marble", "mirror",  "needle", "orange", "paper",  "pepper", "piano",
    "pillow", "planet", "rabbit", "ribbon", "river",  "silver", "spider",  "sugar",  "temple", "ticket", "violin", "window"};

// From the engine's own bits: the standard's distributions differ between libraries.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : bits_(seed) {}
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(bits_() % n); }
  std::vector<std::size_t> shuffled(std::size_t n) {
    std::vector<std::size_t> order(n);
    for (std::size_t i = 0; i < n; ++i) order[i] = i;
    for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    return order;
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace oscar::cli

// Rates of codec `spectral` in bits per element of K and of V: which exist, and how text gives single layers others than the
// rest.
//
// Text: "none", or entries LAYERS:RATE with commas between them. LAYERS is a layer's number or a range "5-7"; RATE is "3" (K
// and V), "3/2.5" (K and V), "k3" (K; V as the other layers) or "v3". Example: "0:3,1:3/2.5,5-7:k3".
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

inline constexpr std::array<double, 4> kSpectralRates = {1.5, 2.0, 2.5, 3.0};
inline constexpr int kMaxRatedLayer = 9999;

[[nodiscard]] std::string rate_names();  // "1.5, 2, 2.5 or 3"
[[nodiscard]] bool is_rate(double bits);
[[nodiscard]] std::optional<double> find_rate(std::string_view text);  // nullopt: no such rate

struct Rates {
  double k = 2, v = 2;
};

struct LayerRates {  // of one layer; what is empty is as in all layers
  int layer = 0;
  std::optional<double> k, v;
  bool operator==(const LayerRates&) const = default;
};

// Ascending by layer, each layer once. Error naming the entry: another form, no such rate, a number above kMaxRatedLayer, or a
// layer that gets two rates for the same half.
[[nodiscard]] std::vector<LayerRates> parse_layer_rates(std::string_view text);
// The shortest text that parse_layer_rates() reads as the same; "none" for an empty list. `layers` as it gives them.
[[nodiscard]] std::string to_text(std::span<const LayerRates> layers);

}  // namespace oscar
